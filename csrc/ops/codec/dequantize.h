// dequantize: W = codebook[index] * decode(absmax), one float32 multiply, rounded once to the output's type.
#pragma once

#include <cstdint>

#include "format/block.h"

namespace kbitq {

struct DequantizeArgs {
    const int32_t* packed;  // [rows, nblk * K]
    const void* absmax;     // [rows, nblk] uint8 E4M4 or float32
    bool absmax_is_float;
    const float* codebook;  // [2^K]
    int k;
    void* out;  // [rows, cols] written once
    DType dtype;
    int64_t rows, cols;
};

void dequantize_cpu(const DequantizeArgs& args, int threads);
void dequantize_cuda(const DequantizeArgs& args, int device, void* stream);

}  // namespace kbitq
