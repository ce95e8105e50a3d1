// quantize: a matrix to bit planes, scale bytes and the stored codebook (format.md sections 2 and 3).
#pragma once

#include <cstdint>

#include "format/block.h"

namespace kbitq {

enum class ScaleRule { absmax, mse };

struct QuantizeArgs {
    const void* w;  // [rows, cols], finite
    DType dtype;
    int64_t rows, cols;
    int k;
    ScaleRule rule;
    const float* levels;  // [2^K] ascending
    const float*
        amax;  // [1] max |w| of the whole tensor: sets its power of two. null: none (x = 0, levels as they are)
    const float* importance;  // [importance_rows, cols] scaled into [0, 2), or null
    int64_t importance_rows;  // divides rows; row r uses r / (rows / importance_rows)
    int32_t* packed;          // [rows, nblk * K] out
    void* absmax;             // [rows, nblk] out: uint8 E4M4, or float32 exact maxima (absmax rule, no amax)
    bool absmax_is_float;
    float* codebook;  // [2^K] out: levels * 2^x; null when amax is
};

void quantize_cpu(const QuantizeArgs& args, int threads);
void quantize_cuda(const QuantizeArgs& args, int device, void* stream);

}  // namespace kbitq
