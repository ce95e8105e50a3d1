// What the kernels for many rows of x and for sm_90a (tiled_many.cuh, tiled_sm90.cuh) have in common: parameters, the
// share of a CTA and a warp, sums over CTAs that share columns, and the output.
#pragma once

#include "codecs/tile_levels.cuh"
#include "ops/linear/tiled.h"

namespace kbitq::tiled {

struct TiledParams {
    const void* x;
    const uint8_t* tiles;
    const float* codebook;
    const void* bias;
    void* y;
    float4* partial;         // [blocks * warps][splits][kTiles * NT][32]
    uint32_t* counters;      // [blocks * warps]
    const int32_t* offsets;  // [experts + 1]: the rows of x of each expert; null: one, with all m rows
    int64_t rows, cols;      // rows of an expert
    int64_t m;
    int tiles_per_group;
    int blocks_per_group;  // CTAs (times splits)
    int groups_per_expert;
    int chunks;
    int splits;
    bool vector_x;
};

// The parameters of one matrix, without experts; the caller adds x and vector_x.
inline TiledParams tiled_params(const TiledLinearArgs& args, int blocks_per_group, int splits) {
    TiledParams p{};
    p.tiles = reinterpret_cast<const uint8_t*>(args.weight.words);
    p.codebook = args.weight.codebook;
    p.bias = args.bias;
    p.y = args.y;
    p.partial = reinterpret_cast<float4*>(args.workspace);
    p.counters = args.counters;
    p.rows = args.weight.rows;
    p.cols = args.weight.cols;
    p.m = args.m;
    p.tiles_per_group = static_cast<int>(row_tiles(args.weight.rows / args.weight.groups));
    p.blocks_per_group = blocks_per_group;
    p.groups_per_expert = static_cast<int>(args.weight.groups);
    p.chunks = static_cast<int>(tile_chunks(args.weight.cols));
    p.splits = splits;
    return p;
}

// Which row tiles and which chunks of 256 columns a CTA and a warp of it have.
struct TiledShare {
    int split, block, group;  // of the CTA; CTAs of one block share its row tiles
    int first_tile;           // of the CTA, in its group
    int tile_in_group;        // the first of the warp, which may be past the group's last
    int64_t tile;             // the same, counted from the matrix's first
    int first, end;           // chunks
};

// Tiles: row tiles of a warp.
template <int Tiles>
__device__ __forceinline__ TiledShare share_of(const TiledParams& p, int warp, int warps) {
    TiledShare s;
    s.split = blockIdx.x % p.splits, s.block = blockIdx.x / p.splits, s.group = s.block / p.blocks_per_group;
    s.first_tile = s.block % p.blocks_per_group * warps * Tiles, s.tile_in_group = s.first_tile + warp * Tiles;
    s.tile = static_cast<int64_t>(s.group) * p.tiles_per_group + s.tile_in_group;
    s.first = static_cast<int64_t>(s.split) * p.chunks / p.splits;
    s.end = static_cast<int64_t>(s.split + 1) * p.chunks / p.splits;
    return s;
}

// Adds up what all splits have for a warp's row tiles, in the order of the splits. True for the last warp to arrive,
// which then has the result in `sum`.
template <int N>
__device__ __forceinline__ bool gather_splits(const TiledParams& p, int warp, int split, float (&sum)[N][4]) {
    const int lane = threadIdx.x % 32;
    float4* slot = p.partial + static_cast<int64_t>(warp) * p.splits * N * 32 + lane;
#pragma unroll
    for (int n = 0; n < N; ++n)
        __stcg(&slot[(split * N + n) * 32], make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]));
    __threadfence();
    __syncwarp();
    unsigned arrived = 0;
    if (lane == 0) arrived = atomicAdd(&p.counters[warp], 1u);
    if (__shfl_sync(0xFFFFFFFFu, arrived, 0) != static_cast<unsigned>(p.splits - 1)) return false;
    if (lane == 0) p.counters[warp] = 0;
    __threadfence();
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
    for (int s = 0; s < p.splits; ++s) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float4 v = __ldcg(&slot[(s * N + n) * 32]);
            sum[n][0] += v.x, sum[n][1] += v.y, sum[n][2] += v.z, sum[n][3] += v.w;
        }
    }
    return true;
}

template <typename T, int NT>
__device__ __forceinline__ void store_tile(const TiledParams& p, T* y, int64_t row0, int64_t m0, int64_t m,
                                           int exponent, const float (&sum)[NT][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t row = row0 + g + 8 * half;
        if (row >= p.rows) continue;
        const float bias = p.bias ? Element<T>::widen(static_cast<const T*>(p.bias)[row]) : 0.0f;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int64_t column = m0 + n * 8 + 2 * t + c;
                const float v = multiply_exp2(sum[n][2 * half + c], exponent) + bias;
                if (column < m) y[column * p.rows + row] = Element<T>::round(v);
            }
        }
    }
}

}  // namespace kbitq::tiled
