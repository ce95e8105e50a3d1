// A packed matrix as every op sees it: its parts, the codec that reads them, and its size.
#pragma once

#include <cstdint>
#include <type_traits>

#include "format/block.h"
#include "format/trellis.h"

namespace kbitq {

// Who reads the words of a block. A codec's numbers and kernels are in codecs/<name>*.
enum class Codec : int { planes, trellis };

// kWritable: ops that fill the parts. The words lie in one of two orders:
//
//              words                                             scales
//     rows     [rows, nblk * k], block after block               [rows, scales_per_row], bytes or floats
//     tiles    [row_tiles][tile_chunks][tile_words(k)]           none: the bytes are in the records
//              (format/tile_order.h)
template <bool kWritable>
struct BasicPackedMatrix {
    template <typename T>
    using Part = std::conditional_t<kWritable, T, const T>;

    Codec codec;
    int k;             // words of a block
    int scale_blocks;  // neighbouring blocks of a row that share a scale
    int64_t rows, cols;
    int64_t groups;  // codebooks; row r uses number r / (rows / groups)
    Part<uint32_t>* words;
    Part<uint8_t>* scales;      // E4M4
    Part<float>* float_scales;  // instead of bytes, where not null
    Part<float>* codebook;      // [groups, levels]
};

using PackedMatrix = BasicPackedMatrix<false>;
using PackedOutput = BasicPackedMatrix<true>;

static inline PackedMatrix read_only(const PackedOutput& m) {
    return {m.codec, m.k, m.scale_blocks, m.rows, m.cols, m.groups, m.words, m.scales, m.float_scales, m.codebook};
}

// Levels of one codebook.
template <bool kWritable>
static inline int64_t level_count(const BasicPackedMatrix<kWritable>& m) {
    return m.codec == Codec::trellis ? trellis_levels(m.k) : int64_t{1} << m.k;
}

// Scales of a row; the last may be of fewer blocks.
KBITQ_HD constexpr int64_t scales_per_row(int64_t cols, int scale_blocks) {
    return (blocks_per_row(cols) + scale_blocks - 1) / scale_blocks;
}

template <bool kWritable>
static inline int64_t scales_per_row(const BasicPackedMatrix<kWritable>& m) {
    return scales_per_row(m.cols, m.scale_blocks);
}

}  // namespace kbitq
