// The scale of a block on the CPU.
#pragma once

#include "codecs/packed_matrix.h"

namespace kbitq {

// `table`: of scale bytes (cpu/scale_table.h).
static inline float block_scale(const PackedMatrix& m, const float* table, int64_t block) {
    return m.float_scales ? m.float_scales[block] : table[m.scales[block]];
}

}  // namespace kbitq
