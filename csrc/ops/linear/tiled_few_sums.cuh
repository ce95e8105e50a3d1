// How the kernel for few rows of x (tiled_few.cuh) adds up: within a warp, over the warps of a team, over CTAs that
// share columns.
#pragma once

#include <type_traits>

#include "codecs/tile_levels.cuh"
#include "cuda/mma.cuh"
#include "ops/linear/tiled_few_plan.h"

namespace kbitq::tiled {

// Quotients are computed on the host, not by each thread: at M = 1 the kernel lasts as long as some hundred divisions.
struct FewParams {
    const void* x;
    const uint8_t* tiles;
    const float* codebook;
    const void* bias;
    void* y;
    float* partial;      // [splits][m][rows] where splits are added through it
    uint32_t* counters;  // [groups * parts]
    int64_t rows, cols;
    int m;
    int tiles_per_group;           // row tiles
    int parts;                     // as in FewPlan
    int part_tiles, longer;        // row tiles of a part: part_tiles, and one more in the first `longer`
    int chunks;                    // of 256 columns
    int split_shift;               // as in FewPlan
    int team_shift;                // as in FewPlan
    int team_warps;                // of a team, for chunks side by side
    int passes;                    // as in FewPlan
    int64_t tile_step, pass_step;  // bytes from a record to the same warp's of the next row tile, of the next chunk
    int batch;                     // as in FewPlan
    int total_tiles;               // as in FewPlan
    bool cluster;                  // as in FewPlan
    bool vector_x;                 // rows of x can be read 16 bytes at a time
    int whole_chunks;              // chunks that lie within the columns; 0 unless vector_x
};

// b-operands of a chunk: one for each block; for 16 rows of x, two.
template <int MP>
constexpr int kOperands = MP == 16 ? 16 : 8;

// Adds the lanes that hold the same rows of x for different blocks, and leaves 16 * MP sums at out[row * MP + column];
// of 16 columns, the first 8 and then the others.
template <int MP>
__device__ __forceinline__ void store_partial(const float (&sums)[kOperands<MP> / 8][4], bool add, float* out) {
    const float (&sum)[4] = sums[0];
    const unsigned all = 0xFFFFFFFFu;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (MP == 1) {
        const float keep = t % 2 ? sum[2] : sum[0], send = t % 2 ? sum[0] : sum[2];
        float v = keep + __shfl_xor_sync(all, send, 1);
        v += __shfl_xor_sync(all, v, 2);
        float* to = out + g + 8 * t;
        if (t < 2) *to = add ? *to + v : v;
    } else if constexpr (MP == 2) {
        // After the first exchange lane t keeps row g (t < 2) or g + 8, after the second column t % 2
        const float k0 = t / 2 ? sum[2] : sum[0], k1 = t / 2 ? sum[3] : sum[1];
        const float s0 = t / 2 ? sum[0] : sum[2], s1 = t / 2 ? sum[1] : sum[3];
        const float c0 = k0 + __shfl_xor_sync(all, s0, 2), c1 = k1 + __shfl_xor_sync(all, s1, 2);
        const float v = (t % 2 ? c1 : c0) + __shfl_xor_sync(all, t % 2 ? c0 : c1, 1);
        float* to = out + (g + 8 * (t / 2)) * MP + t % 2;
        *to = add ? *to + v : v;
    } else if constexpr (MP == 4) {
        const float k0 = t / 2 ? sum[2] : sum[0], k1 = t / 2 ? sum[3] : sum[1];
        const float s0 = t / 2 ? sum[0] : sum[2], s1 = t / 2 ? sum[1] : sum[3];
        float2 v = make_float2(k0 + __shfl_xor_sync(all, s0, 2), k1 + __shfl_xor_sync(all, s1, 2));
        float2* to = reinterpret_cast<float2*>(out + (g + 8 * (t / 2)) * MP + t % 2 * 2);
        if (add) v.x += to->x, v.y += to->y;
        *to = v;
    } else {
#pragma unroll
        for (int n = 0; n < MP / 8; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float2* to = reinterpret_cast<float2*>(out + (n * kTileRows + g + 8 * h) * 8 + t * 2);
                float2 v = make_float2(sums[n][2 * h], sums[n][2 * h + 1]);
                if (add) v.x += to->x, v.y += to->y;
                *to = v;
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_output(const FewParams& p, int m, int64_t row, float v, int exponent) {
    v = multiply_exp2(v, exponent);
    if (p.bias) v += Element<T>::widen(static_cast<const T*>(p.bias)[row]);
    static_cast<T*>(p.y)[m * p.rows + row] = Element<T>::round(v);
}

// Adds up what the warps of a team have, in their order, for `tiles` row tiles from `tile` on: to y, or to `totals`
// [tiles][MP][16].
template <typename T, int MP>
__device__ __forceinline__ void sum_warps(const FewParams& p, const float* sums, int64_t tile, int tiles, float* totals,
                                          bool add, int exponent) {
    constexpr int kSide = MP < 8 ? MP : 8, kWide = MP < 4 ? 1 : 4;  // neighbours that a thread has
    constexpr int kThreads = kTileRows * MP / kWide;                // for a row tile
    using Wide = std::conditional_t<kWide == 4, float4, float>;
    for (int i = threadIdx.x; i < tiles * kThreads; i += blockDim.x) {
        const Wide* from = reinterpret_cast<const Wide*>(sums) + i / kThreads * p.team_warps * kThreads + i % kThreads;
        float v[kWide] = {};
#pragma unroll
        for (int w0 = 0; w0 < kFewMaxWarps; w0 += 8) {  // eight loads in flight
            if (w0 >= p.team_warps) break;
            float part[8][kWide] = {};
#pragma unroll
            for (int w = 0; w < 8; ++w) {
                if (w0 + w < p.team_warps) *reinterpret_cast<Wide*>(part[w]) = from[(w0 + w) * kThreads];
            }
#pragma unroll
            for (int w = 0; w < 8; ++w) {
#pragma unroll
                for (int j = 0; j < kWide; ++j) v[j] += part[w][j];
            }
        }
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
            const int within = i % kThreads * kWide + j;
            const int row = within / kSide % kTileRows, m = within / (kTileRows * kSide) * kSide + within % kSide;
            if (totals) {
                float* const to = totals + (i / kThreads * MP + m) * kTileRows + row;
                *to = add ? *to + v[j] : v[j];
            } else if (const int64_t at = (tile + i / kThreads) * kTileRows + row; m < p.m && at < p.rows) {
                store_output<T>(p, m, at, v[j], exponent);
            }
        }
    }
}

// Stores the totals of `tiles` row tiles to y. In a cluster, each CTA adds up and stores a share of them.
template <typename T, int MP>
__device__ __forceinline__ void store_totals(const FewParams& p, const float* totals, int64_t tile, int tiles,
                                             int split, int exponent) {
    constexpr int kSums = kTileRows * MP;
    const int splits = 1 << p.split_shift, shares = p.cluster ? splits : 1, count = tiles * kSums;
    if (p.cluster) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    for (int i = (p.cluster ? split : 0) * blockDim.x + threadIdx.x; i < count; i += shares * blockDim.x) {
        const int64_t row = (tile + i / kSums) * kTileRows + i % kTileRows;
        const int m = i / kTileRows % MP;
        if (m >= p.m || row >= p.rows) continue;
        float v = 0.0f;
        if (p.cluster) {
            float part[kFewMaxSplits];
#pragma unroll
            for (int s = 0; s < kFewMaxSplits; ++s) part[s] = s < shares ? load_cluster(totals + i, s) : 0.0f;
#pragma unroll
            for (int s = 0; s < kFewMaxSplits; ++s) v += part[s];
        } else {
            v = totals[i];
        }
        if (splits > 1 && !p.cluster) {
            p.partial[(static_cast<int64_t>(split) * p.m + m) * p.rows + row] = v;
        } else {
            store_output<T>(p, m, row, v, exponent);
        }
    }
    if (p.cluster) cluster_sync();  // until all have read
}

// The last CTA of a part to finish adds the splits in their order.
template <typename T>
__device__ __forceinline__ void sum_splits(const FewParams& p, int part, int64_t tile, int tiles, int exponent) {
    const int splits = 1 << p.split_shift;
    __threadfence();
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
        last = atomicAdd(&p.counters[part], 1u) == static_cast<unsigned>(splits - 1);
        if (last) p.counters[part] = 0;
    }
    if (!__syncthreads_or(last)) return;
    __threadfence();
    for (int i = threadIdx.x; i < tiles * kTileRows * p.m; i += blockDim.x) {
        const int64_t row = tile * kTileRows + i % (tiles * kTileRows);
        const int m = i / (tiles * kTileRows);
        if (row >= p.rows) continue;
        float v = 0.0f;
        for (int s = 0; s < splits; ++s) v += __ldcg(&p.partial[(static_cast<int64_t>(s) * p.m + m) * p.rows + row]);
        store_output<T>(p, m, row, v, exponent);
    }
}

}  // namespace kbitq::tiled
