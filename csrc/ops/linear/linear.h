// linear: y = x W^T (+ bias) from packed weights, for few rows of x. The CPU decodes a block once for up to eight of
// them; larger batches are the business of a GEMM over dequantized panels (kbitq/ops/linear.py).
#pragma once

#include <cstdint>

#include "format/block.h"

namespace kbitq {

struct LinearArgs {
    const void* x;  // [batch, in]
    DType dtype;    // of x, bias and out
    int64_t batch, in, out;
    const int32_t* packed;  // [out, nblk * K]
    const uint8_t* absmax;  // [out, nblk] E4M4
    const float* codebook;  // [groups, 2^K]; row r of W uses r / (out / groups)
    int64_t groups;
    int k;
    const void* bias;  // [out] or null
    void* y;           // [batch, out]
};

void linear_cpu(const LinearArgs& args, int threads);

}  // namespace kbitq
