// quantize: a matrix to bit planes, scale bytes and the stored codebook (format.md sections 2 and 3).
#pragma once

#include <cstdint>

#include "codecs/encoding.h"
#include "codecs/packed_matrix.h"
#include "format/dtype.h"

namespace kbitq {

struct QuantizeArgs {
    const void* w;  // [rows, cols], finite
    DType dtype;
    ScaleRule rule;           // exact: the scales are float, for no amax
    const float* levels;      // [2^K] ascending
    const float* amax;        // [1] max |w| of the whole tensor: sets its power of two 2^x. null: x = 0
    const float* importance;  // [importance_rows, cols] scaled into [0, 2), or null
    int64_t importance_rows;  // divides rows; row r uses r / (rows / importance_rows)
    PackedOutput packed;      // codebook: levels * 2^x; null when amax is
};

void quantize_cpu(const QuantizeArgs& args, int threads);
void quantize_cuda(const QuantizeArgs& args, int device, void* stream);

}  // namespace kbitq
