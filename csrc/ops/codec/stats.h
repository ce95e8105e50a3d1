// stats: what quantization cost, row by row: sum w^2, sum (w - w')^2 and max |w - w'| in float64, w' as float32
// (format.md section 3, SQNR: terms of a block in the tree, blocks left to right).
#pragma once

#include <cstdint>

#include "codecs/packed_matrix.h"
#include "format/dtype.h"

namespace kbitq {

constexpr int kStatsColumns = 3;  // signal, noise, largest error

struct StatsArgs {
    const void* w;  // [rows, cols]
    DType dtype;
    PackedMatrix packed;  // one codebook
    double* out;          // [rows, kStatsColumns]
};

void stats_cpu(const StatsArgs& args, int threads);
void stats_cuda(const StatsArgs& args, int device, void* stream);

}  // namespace kbitq
