// The scale of a block on the CPU.
#pragma once

#include "codecs/packed_matrix.h"
#include "cpu/element.h"

namespace kbitq {
namespace {

// Number of the scale of a block, given as its number in the matrix and its place.
[[maybe_unused]] inline int64_t scale_index(const PackedMatrix& m, int64_t block, const BlockAt& at) {
    if (m.scale_blocks == 1) return block;
    return at.row * scales_per_row(m) + at.column / (kBlock * m.scale_blocks);
}

// The same where the codec C is known when compiling.
template <typename C>
inline int64_t scale_index_of(const PackedMatrix& m, int64_t block, int64_t row, int64_t column) {
    if constexpr (C::kScaleBlocks == 1) {
        return block;
    } else {
        return row * scales_per_row(m.cols, C::kScaleBlocks) + column / (kBlock * C::kScaleBlocks);
    }
}

// The blocks of one scale: the number in the matrix of the first of them, and how many.
struct ScaleAt {
    int64_t block;
    int blocks;
};

[[maybe_unused]] inline ScaleAt scale_at(const PackedOutput& m, int64_t scale) {
    if (m.scale_blocks == 1) return {scale, 1};
    const int64_t per_row = scales_per_row(m), nblk = blocks_per_row(m.cols);
    const int64_t first = scale % per_row * m.scale_blocks;
    const int64_t left = nblk - first;
    return {scale / per_row * nblk + first, left < m.scale_blocks ? static_cast<int>(left) : m.scale_blocks};
}

// `table`: of scale bytes (cpu/scale_table.h).
[[maybe_unused]] inline float scale_value(const PackedMatrix& m, const float* table, int64_t index) {
    return m.float_scales ? m.float_scales[index] : table[m.scales[index]];
}

}  // namespace
}  // namespace kbitq
