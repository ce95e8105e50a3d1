// Where the blocks of a quantize call lie in its matrix, and their error weights; on the GPU.
#pragma once

#include "cuda/element.cuh"
#include "ops/codec/quantize.h"

namespace kbitq {
namespace {

// Where a thread's block lies in the matrix.
struct Place {
    int64_t row, column;  // of its first element
    int length;           // elements; 0 for a thread without a block
};

__device__ __forceinline__ Place place_of(const QuantizeArgs& a, int64_t block, int64_t blocks) {
    if (block >= blocks) return {0, 0, 0};
    const int64_t nblk = blocks_per_row(a.packed.cols), row = block_row(block, nblk),
                  column = (block - row * nblk) * kBlock;
    return {row, column, static_cast<int>(min(a.packed.cols - column, int64_t{kBlock}))};
}

// The error weights: importance, or ones where it is absent or all zero; zeros past the end. `whole`: its rows are
// whole blocks, 16-byte aligned.
__device__ __forceinline__ void load_weights(float (&weight)[kBlock], const QuantizeArgs& a, const Place& at,
                                             bool whole) {
    const float* p = a.importance
                         ? a.importance + at.row / (a.packed.rows / a.importance_rows) * a.packed.cols + at.column
                         : nullptr;
    bool any = false;
    if (p && whole) {
#pragma unroll
        for (int i = 0; i < kBlock; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(p + i);
            weight[i] = four.x, weight[i + 1] = four.y, weight[i + 2] = four.z, weight[i + 3] = four.w;
        }
    } else {
        load_tail(weight, at.length, [&](int i) { return p ? p[i] : 1.0f; });
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) any = any || weight[i] != 0.0f;
    if (any) return;
    load_tail(weight, at.length, [](int) { return 1.0f; });
}

}  // namespace
}  // namespace kbitq
