// The scale of a block on the GPU, in the order of rows.
#pragma once

#include "codecs/packed_matrix.h"
#include "cuda/element.cuh"
#include "format/scale_e4m4.h"

namespace kbitq {
namespace {

// Number of the scale of block `block` of the matrix. Rows of whole scales need no division, which would be felt.
template <class Codec>
__device__ __forceinline__ int64_t scale_index(const PackedMatrix& m, int64_t block) {
    if constexpr (Codec::kScaleBlocks == 1) {
        return block;
    } else {
        const int64_t nblk = blocks_per_row(m.cols);
        if (nblk % Codec::kScaleBlocks == 0) return static_cast<uint64_t>(block) / Codec::kScaleBlocks;
        const int64_t row = block_row(block, nblk);
        return row * scales_per_row(m.cols, Codec::kScaleBlocks) + (block - row * nblk) / Codec::kScaleBlocks;
    }
}

template <class Codec, bool kFloatScale>
__device__ __forceinline__ float load_scale(const PackedMatrix& m, int64_t block) {
    if constexpr (kFloatScale) return m.float_scales[block];
    return decode_e4m4(m.scales[scale_index<Codec>(m, block)]);
}

}  // namespace
}  // namespace kbitq
