// linear: y = x W^T (+ bias) from packed weights, for few rows of x. The CPU decodes a block once for up to eight of
// them; larger batches are the business of a GEMM over dequantized panels (kbitq/ops/linear.py).
#pragma once

#include <cstdint>

#include "codecs/packed_matrix.h"
#include "format/dtype.h"

namespace kbitq {

struct LinearArgs {
    const void* x;  // [batch, weight.cols]
    DType dtype;    // of x, bias and y
    int64_t batch;
    PackedMatrix weight;  // E4M4 scales
    const void* bias;     // [weight.rows] or null
    void* y;              // [batch, weight.rows]
};

void linear_cpu(const LinearArgs& args, int threads);

}  // namespace kbitq
