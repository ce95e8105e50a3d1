// y = x W^T for up to 16 rows of x: the tensor cores at M = 1.
//
// A CTA (one an SM) has up to 16 warps, in `lanes` of as many as it has chunks of 256 columns at a time. A warp owns a
// chunk, so that the activations it needs stay in 32 registers (64 for 16 rows), while the records of its lane's row
// tiles stream by: cp.async into a ring of its own (each thread reads back what it copied itself), four subtiles
// decoded and multiplied, one partial sum per row kept in shared memory. Warps meet only when a batch of row tiles is
// done, and add up in the order of the chunks.
//
// CTAs may share the columns (`splits`): each then fetches only its part of x, which counts from 8 rows on and where W
// is wide, and they add up at the end, in their order: in a cluster by reading each other's shared memory, on older
// cards through the workspace.
//
// mma has 8 columns for activations. With fewer rows of x the free columns hold *other blocks* of the same row: at M =
// 1, column n is block n of the chunk (the operand is zero outside it), so eight blocks accumulate without a scale
// between them, and a lane has to scale 4 sums for 128 weights instead of 32:
//
//     MP = 1   columns = 8 blocks            scaled every 8 blocks
//     MP = 2   columns = 4 blocks x 2 rows   every 4
//     MP = 4   columns = 2 blocks x 4 rows   every 2
//     MP = 8   columns = 8 rows              every one
//     MP = 16  columns = 8 rows, twice       the weights are scaled instead
#pragma once

#include <type_traits>

#include "cuda/tile_decode.cuh"
#include "ops/matmul_gemv_plan.h"

namespace kbitq::matmul {

// What a thread would have to divide for is here, divided: at M = 1 a kernel lasts as long as some hundred divisions.
struct GemvParams {
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
    int parts;                     // of a group's row tiles, one CTA (times splits) each
    int part_tiles, longer;        // row tiles of a part: part_tiles, and one more in the first `longer`
    int chunks;                    // of 256 columns
    int split_shift;               // log2 of the CTAs that share a part, by chunks
    int lane_shift;                // log2 of the lanes: of warps, for row tiles in turn
    int lane_warps;                // of a lane, for chunks side by side
    int passes;                    // until these have been through all chunks
    int64_t tile_step, pass_step;  // bytes from a warp's record to that of its next row tile; to that of its next chunk
    int batch;                     // row tiles between two sums over the warps; a multiple of the lanes
    int total_tiles;               // row tiles whose sums have a place in shared memory (Totals)
    bool cluster;                  // those CTAs are a cluster
    bool vector_x;                 // rows of x can be read 16 bytes at a time
    int whole_chunks;              // that lie within the columns, if so; else 0
};

constexpr int kBlockShared = 227 * 1024;  // bytes of shared memory of a block on sm_90

template <int K>
struct Record {
    static constexpr int kWords = tile_words(K);
    static constexpr int kBytes = kWords * 4;
    static constexpr int kScaleOffset = tile_index_words(K) * 4;
};

// The words of a lane in a record; `own` is the shared address of its first.
template <int K>
__device__ __forceinline__ void load_words(uint32_t own, uint32_t (&w)[4 * K]) {
#pragma unroll
    for (int j = 0; j < K; ++j) {
        const uint4 v = load_record_128(own + j * 512);
        w[4 * j] = v.x, w[4 * j + 1] = v.y, w[4 * j + 2] = v.z, w[4 * j + 3] = v.w;
    }
}

// From the address of a lane's first word in a record to that of the scales of its rows: four words, one a subtile.
template <int K>
__device__ __forceinline__ int scales_from_own() {
    const int lane = threadIdx.x % 32;
    return Record<K>::kScaleOffset + lane / 4 * 16 - lane * 16;
}

// A decoded subtile times its scales.
template <typename T>
__device__ __forceinline__ void scale_subtile(uint32_t word, uint32_t (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t scales = scale_pair<T>(word, i);
#pragma unroll
        for (int r = 0; r < 8; ++r)
            a[8 * i + r] = Pair<T>::multiply(a[8 * i + r], r % 2 ? high_twice(scales) : low_twice(scales));
    }
}

// Copies one record, 16 bytes a lane at a time; `from` and `to` are this lane's.
template <int K>
__device__ __forceinline__ void copy_record(uint32_t to, const uint8_t* from) {
#pragma unroll
    for (int j = 0; j < K; ++j) copy_async_16(to + j * 512, from + j * 512);
    if (threadIdx.x % 32 < kTileScaleWords / 4) {
        copy_async_16(to + Record<K>::kScaleOffset, from + Record<K>::kScaleOffset);
    }
}

// A lane's own activations of a chunk: for each group q of 8 / MP blocks, 8 neighbours of its row and block (MP = 16:
// of row g, then of row g + 8).
template <typename T, int MP>
__device__ __forceinline__ void fetch_activations(const GemvParams& p, int chunk, uint4 (&own)[MP]) {
    constexpr int kBlocks = MP < 8 ? 8 / MP : 1;  // side by side in the columns
    const int lane = threadIdx.x % 32, g = lane / 4, first = g / MP * kBlock + lane % 4 * 8;
    const T* const source =
        static_cast<const T*>(p.x) + g % MP * p.cols + static_cast<int64_t>(chunk) * kTileCols + first;
#pragma unroll
    for (int q = 0; q < MP; ++q) {
        const int offset = q % 8 * kBlocks * kBlock;
        const T* const from = source + q / 8 * 8 * p.cols + offset;
        own[q] = make_uint4(0, 0, 0, 0);
        if (g % MP + q / 8 * 8 >= p.m) continue;
        const int64_t col = static_cast<int64_t>(chunk) * kTileCols + first + offset;
        if (chunk < p.whole_chunks || (p.vector_x && col < p.cols)) {
            own[q] = *reinterpret_cast<const uint4*>(from);
        } else if (!p.vector_x) {
            uint16_t e[8];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                e[i] = col + i < p.cols ? reinterpret_cast<const uint16_t*>(from)[i] : uint16_t{0};
            own[q] = make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
        }
    }
}

// Brings a chunk's activations to the L1, so that fetching them later need not wait behind the weights.
template <typename T>
__device__ __forceinline__ void touch_activations(const GemvParams& p, int chunk) {
    const int64_t col = static_cast<int64_t>(chunk) * kTileCols + threadIdx.x % 32 * 8;
    uint32_t ignored;
    for (int m = 0; m < p.m; ++m) {
        if (col >= p.cols) continue;
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(ignored) : "l"(static_cast<const T*>(p.x) + m * p.cols + col));
    }
}

// The b-operands of a chunk: one for each block, for 16 rows of x two.
template <int MP>
constexpr int kOperands = MP == 16 ? 16 : 8;

// They as b-operands: b[block][2 * step + register], zero where the column is not the block's. The zeros stay in
// registers (the compiler would rather select them again in the loop).
template <int MP>
__device__ __forceinline__ void spread_activations(const uint4 (&own)[MP], uint32_t (&b)[kOperands<MP>][4]) {
    constexpr int kBlocks = MP < 8 ? 8 / MP : 1;
    const int mine = threadIdx.x % 32 / 4 / MP;
#pragma unroll
    for (int block = 0; block < kOperands<MP>; ++block) {
        const uint4 v = own[block / kBlocks];
        const bool here = block % kBlocks == mine;
        b[block][0] = here ? v.x : 0;
        b[block][1] = here ? v.y : 0;
        b[block][2] = here ? v.z : 0;
        b[block][3] = here ? v.w : 0;
#pragma unroll
        for (int r = 0; r < 4; ++r) asm volatile("" : "+r"(b[block][r]));
    }
}

// Scales the sums of group q of blocks and adds them to `sum` (rows g, g, g+8, g+8). `scales`: the address of the
// scales of the lane's rows.
template <int MP>
__device__ __forceinline__ void add_scaled(const float (&c)[4], uint32_t scales, int q, float (&sum)[4]) {
    const int t = threadIdx.x % 4;
    if constexpr (MP == 1) {
        const uint32_t word = load_record_32(scales + 4 * t);  // blocks 2t and 2t + 1, the lane's two columns
        sum[0] = c[0] * scale_value(word, 0) + c[1] * scale_value(word, 1);
        sum[2] = c[2] * scale_value(word, 2) + c[3] * scale_value(word, 3);
    } else {
        const int block = q * (8 / MP) + 2 * t / MP;
        const uint32_t word = load_record_32(scales + block / 2 * 4) >> (8 * (block % 2));
        const float low = scale_value(word, 0), high = scale_value(word, 2);
        sum[0] += c[0] * low;
        sum[1] += c[1] * low;
        sum[2] += c[2] * high;
        sum[3] += c[3] * high;
    }
}

// 16 x 256 weights times the chunk's activations. sum: rows g (0, 1) and g + 8 (2, 3), columns 2t and 2t + 1 of the
// operand (MP = 1: [0] and [2] only, both columns added).
template <typename T, int K, int MP, typename Decode>
__device__ __forceinline__ void multiply_record(uint32_t own, uint32_t scales, const Decode& decode,
                                                const uint32_t (&b)[8][4], float (&sum)[1][4]) {
    constexpr int kBlocks = 8 / MP;
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t w[4 * K];
    load_words<K>(own, w);
    sum[0][0] = sum[0][1] = sum[0][2] = sum[0][3] = 0.0f;
    float even[4], odd[4];  // two chains, so that mma need not wait for mma
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        uint32_t a[16];
        decode(w + s * K, s, a);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = 2 * s + i;
            const bool first = block % kBlocks == 0;
            if (first) {
                Pair<T>::mma(even, a + 8 * i, b[block], zero);
            } else {
                Pair<T>::mma(even, a + 8 * i, b[block], even);
            }
            if (kBlocks == 1) {
                Pair<T>::mma(even, a + 8 * i + 4, b[block] + 2, even);
            } else if (first) {
                Pair<T>::mma(odd, a + 8 * i + 4, b[block] + 2, zero);
            } else {
                Pair<T>::mma(odd, a + 8 * i + 4, b[block] + 2, odd);
            }
            if (block % kBlocks == kBlocks - 1) {
                if (kBlocks > 1) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) even[r] += odd[r];
                }
                add_scaled<MP>(even, scales, block / kBlocks, sum[0]);
            }
        }
    }
}

// The same for 8 N rows of x: weights are scaled before they are multiplied, sums go on over the whole record.
template <typename T, int K, typename Decode, int Operands, int N>
__device__ __forceinline__ void multiply_scaled(uint32_t own, uint32_t scales, const Decode& decode,
                                                const uint32_t (&b)[Operands][4], float (&sum)[N][4]) {
    uint32_t w[4 * K];
    load_words<K>(own, w);
    const uint4 scale_words = load_record_128(scales);
    const uint32_t of_subtile[4] = {scale_words.x, scale_words.y, scale_words.z, scale_words.w};
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        uint32_t a[16];
        decode(w + s * K, s, a);
        scale_subtile<T>(of_subtile[s], a);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                Pair<T>::mma(sum[n], a + 4 * step, b[8 * n + 2 * s + step / 2] + step % 2 * 2, sum[n]);
            }
        }
    }
}

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
__device__ __forceinline__ void store_output(const GemvParams& p, int m, int64_t row, float v, int exponent) {
    v = multiply_exp2(v, exponent);
    if (p.bias) v += Pair<T>::to_float(static_cast<const T*>(p.bias)[row]);
    static_cast<T*>(p.y)[m * p.rows + row] = Pair<T>::from_float(v);
}

// Sums over a lane's warps, in their order, for `tiles` row tiles from `tile` on: to y, or to `totals` [tiles][MP][16].
template <typename T, int MP>
__device__ __forceinline__ void sum_warps(const GemvParams& p, const float* sums, int64_t tile, int tiles,
                                          float* totals, bool add, int exponent) {
    constexpr int kSide = MP < 8 ? MP : 8, kWide = MP < 4 ? 1 : 4;  // neighbours that a thread has
    constexpr int kThreads = kTileRows * MP / kWide;                // for a row tile
    using Wide = std::conditional_t<kWide == 4, float4, float>;
    for (int i = threadIdx.x; i < tiles * kThreads; i += blockDim.x) {
        const Wide* from = reinterpret_cast<const Wide*>(sums) + i / kThreads * p.lane_warps * kThreads + i % kThreads;
        float v[kWide] = {};
#pragma unroll
        for (int w0 = 0; w0 < kGemvMaxWarps; w0 += 8) {  // loads in flight
            if (w0 >= p.lane_warps) break;
            float part[8][kWide] = {};
#pragma unroll
            for (int w = 0; w < 8; ++w) {
                if (w0 + w < p.lane_warps) *reinterpret_cast<Wide*>(part[w]) = from[(w0 + w) * kThreads];
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

// The totals of `tiles` row tiles to y. In a cluster, each CTA does a share of it, for all of them.
template <typename T, int MP>
__device__ __forceinline__ void store_totals(const GemvParams& p, const float* totals, int64_t tile, int tiles,
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
            float part[kGemvMaxSplits];
#pragma unroll
            for (int s = 0; s < kGemvMaxSplits; ++s) part[s] = s < shares ? load_cluster(totals + i, s) : 0.0f;
#pragma unroll
            for (int s = 0; s < kGemvMaxSplits; ++s) v += part[s];
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
__device__ __forceinline__ void sum_splits(const GemvParams& p, int part, int64_t tile, int tiles, int exponent) {
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

// How an instance is made up, measured on an H200.
template <int K, int MP>
struct GemvLayout {
    static constexpr bool kScaled = MP == 16;                       // weights, instead of sums
    static constexpr int kInRegisters = K == 2 && MP < 16 ? 1 : 0;  // subtiles of four decoded there
    static constexpr int kCopies = K == 5 && MP >= 8 ? 16 : 32;     // of a table entry: the rest goes to sums
    static constexpr int kStages = MP == 8 ? 3 : MP == 1 && K <= 4 ? 3 : 2;
    static constexpr bool kAhead = MP == 1;  // registers are left to fetch a chunk's activations before their turn
};

// Totals: CTAs share the columns, or sums are kept over several passes through a batch.
template <typename T, int K, int MP, int Copies, bool Totals>
__global__ __launch_bounds__(kGemvMaxWarps * 32, 1) void gemv_kernel(const GemvParams p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) uint8_t shared[];
    check_table_base(shared);
    using Layout = GemvLayout<K, MP>;
    constexpr int kSums = kTileRows * MP, kBytes = Record<K>::kBytes, kStages = Layout::kStages;
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32, warps = blockDim.x / 32;
    const int lanes = 1 << p.lane_shift, lane = warp & (lanes - 1), lane_warp = warp >> p.lane_shift;
    uint8_t* const rings = shared + Table<K, Copies>::kBytes;
    float* const totals = reinterpret_cast<float*>(rings + warps * kStages * kBytes);
    float* const sums = Totals ? totals + p.total_tiles * kSums : totals;

    // Which row tiles, which chunks.
    const int split_shift = Totals ? p.split_shift : 0, split = blockIdx.x & ((1 << split_shift) - 1);
    const int part = blockIdx.x >> split_shift, group = blockIdx.y;
    const int first = part * p.part_tiles + min(part, p.longer), tiles = p.part_tiles + (part < p.longer);
    const int64_t tile0 = static_cast<int64_t>(group) * p.tiles_per_group + first;
    const int own_tiles = (tiles - lane + lanes - 1) >> p.lane_shift;
    const int chunk_step = p.lane_warps << split_shift, chunk0 = split * p.lane_warps + lane_warp;
    const int own_passes = p.passes - (chunk0 + (p.passes - 1) * chunk_step >= p.chunks);

    // The ring, and where the next record comes from: for each of the warp's chunks, its row tiles.
    const uint32_t ring = shared_address(rings) + warp * kStages * kBytes + thread * 16;
    const uint8_t* from = p.tiles + ((tile0 + lane) * p.chunks + chunk0) * kBytes + thread * 16;
    int to_copy = own_tiles * own_passes, tiles_to_copy = own_tiles;
    const auto copy_next = [&](uint32_t slot) {
        if (to_copy > 0) {
            --to_copy;
            copy_record<K>(slot, from);
            from += p.tile_step;
            if (--tiles_to_copy == 0) {
                tiles_to_copy = own_tiles;
                from += p.pass_step - own_tiles * p.tile_step;
            }
        }
        copy_async_commit();
    };
    // What does not change (ops/repack.h) is read before the kernel ahead has ended: the codebook, which the table
    // waits for, goes ahead of the weights, or it would wait for all of those.
    const float level = load_level<K>(p.codebook + group * (1 << K));
    // Many copies at once hold up what else is fetched: where the activations are next, all but one come after them.
    constexpr int kAtOnce = Layout::kAhead ? 1 : kStages - 1;
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) copy_next(ring + s * kBytes);
    launch_dependents();
    int exponent;
    const uint32_t kept = normalised_level<T, K>(level, exponent, Layout::kScaled ? ScalePairs<T>::kLift : 0);
    if (Layout::kScaled) exponent -= ScalePairs<T>::kBias;
    fill_table<K, Copies>(kept, warp, warps);
    const Decoder<K, Copies, Layout::kInRegisters> decode(kept);
    wait_for_dependency();
    constexpr bool kAhead = Layout::kAhead;
    uint4 fetched[MP] = {};
    if (kAhead && own_passes > 0) fetch_activations<T, MP>(p, chunk0, fetched);
    if (MP <= 2 && p.vector_x) {
        for (int pass = 1; pass < own_passes; ++pass) touch_activations<T>(p, chunk0 + pass * chunk_step);
    }
#pragma unroll
    for (int s = kAtOnce; s < kStages - 1; ++s) copy_next(ring + s * kBytes);
    __syncthreads();

    const bool one_batch = tiles <= p.batch;
    const int to_scales = scales_from_own<K>();
    uint32_t slot = ring, free_slot = ring + (kStages - 1) * kBytes;
    for (int pass = 0; pass < p.passes; ++pass) {
        const bool has_chunk = pass < own_passes;
        uint32_t b[kOperands<MP>][4];
        const int chunk = chunk0 + pass * chunk_step;
        if (!kAhead && has_chunk) fetch_activations<T, MP>(p, chunk, fetched);
        spread_activations<MP>(fetched, b);
        if (kAhead && pass + 1 < own_passes) fetch_activations<T, MP>(p, chunk + chunk_step, fetched);
        for (int done = 0; done < tiles; done += p.batch) {
            const int these = min(p.batch, tiles - done);
            float* out = sums + (lane * p.lane_warps + lane_warp) * kSums;
            if (has_chunk) {
#pragma unroll 1
                for (int i = lane; i < these; i += lanes) {
                    copy_async_wait<kStages - 2>();
                    __syncwarp();
                    copy_next(free_slot);
                    const uint32_t record = fresh(slot);
                    float sum[kOperands<MP> / 8][4];
                    if constexpr (Layout::kScaled) {
                        multiply_scaled<T, K>(record, record + to_scales, decode, b, sum);
                    } else {
                        multiply_record<T, K, MP>(record, record + to_scales, decode, b, sum);
                    }
                    store_partial<MP>(sum, pass > 0 && one_batch, out);
                    out += warps * kSums;
                    free_slot = slot;
                    slot = slot == ring + (kStages - 1) * kBytes ? ring : slot + kBytes;
                }
            } else if (pass == 0 || !one_batch) {
#pragma unroll 1
                for (int i = lane; i < these; i += lanes) {
                    for (int j = thread; j < kSums; j += 32) out[j] = 0.0f;
                    out += warps * kSums;
                }
            }
            if (one_batch && pass + 1 < p.passes) continue;
            __syncthreads();
            sum_warps<T, MP>(p, sums, tile0 + done, these, Totals ? totals + done * kSums : nullptr,
                             Totals && pass > 0 && !one_batch, exponent);
            if (!one_batch) __syncthreads();
        }
    }
    if constexpr (Totals) {
        store_totals<T, MP>(p, totals, tile0, tiles, split, exponent);
        if (split_shift > 0 && !p.cluster) sum_splits<T>(p, group * p.parts + part, tile0, tiles, exponent);
    }
#else
    __trap();  // matmul_rows keeps callers from here
#endif
}

}  // namespace kbitq::matmul
