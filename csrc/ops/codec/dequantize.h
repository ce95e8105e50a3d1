// dequantize: W = codebook[index] * decode(absmax), one float32 multiply, rounded once to the output's type.
#pragma once

#include <cstdint>

#include "codecs/packed_matrix.h"
#include "format/dtype.h"

namespace kbitq {

struct DequantizeArgs {
    PackedMatrix packed;  // one codebook
    void* out;            // [rows, cols] written once
    DType dtype;
};

void dequantize_cpu(const DequantizeArgs& args, int threads);
void dequantize_cuda(const DequantizeArgs& args, int device, void* stream);

}  // namespace kbitq
