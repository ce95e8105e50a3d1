// y = x W^T for up to 8 rows of x: the tensor cores at M = 1.
//
// A CTA (one an SM) has up to 16 warps. It owns a range of row tiles; each warp owns one chunk of 256 columns at a
// time, so that the activations it needs stay in 32 registers while the records of its row tiles stream by: cp.async
// into a ring of its own (each lane reads back what it copied itself), four subtiles decoded and multiplied, one
// partial sum per row kept in shared memory. Warps meet only when a batch of row tiles is done, and add up in the order
// of the chunks.
//
// mma has 8 columns for activations. With fewer rows of x the free columns hold *other blocks* of the same row: at M =
// 1, column n is block n of the chunk (the operand is zero outside it), so eight blocks accumulate without a scale
// between them, and a lane has to scale 4 sums for 128 weights instead of 32:
//
//     MP = 1   columns = 8 blocks            scaled every 8 blocks
//     MP = 2   columns = 4 blocks x 2 rows   every 4
//     MP = 4   columns = 2 blocks x 4 rows   every 2
//     MP = 8   columns = 8 rows              every one
#pragma once

#include "cuda/tile_decode.cuh"
#include "ops/matmul.h"

namespace kbitq::matmul {

struct GemvParams {
    const void* x;
    const uint8_t* tiles;
    const float* codebook;
    const void* bias;
    void* y;
    float* partial;      // [splits][m][rows] where splits > 1
    uint32_t* counters;  // [groups * parts]
    int64_t rows, cols;
    int m;
    int tiles_per_group;  // row tiles
    int parts;            // of a group's row tiles, one CTA (times splits) each
    int chunks;           // of 256 columns
    int splits;           // CTAs that share a part, by chunks
    int batch;            // row tiles between two sums over the warps
    bool vector_x;        // rows of x can be read 16 bytes at a time
};

constexpr int kGemvMaxWarps = 16;

template <int K>
struct Record {
    static constexpr int kWords = tile_words(K);
    static constexpr int kBytes = kWords * 4;
    static constexpr int kScaleOffset = tile_index_words(K) * 4;
};

// Where a warp is in its sequence of records: for each batch of row tiles, for each of its chunks, the tiles of the
// batch.
struct RecordCursor {
    const uint8_t* at;  // of this lane
    int64_t tile_stride, chunk_stride;
    int tiles_left;  // of the range, from the start of this batch
    int batch, passes;
    int tile = 0, pass = 0;

    __device__ __forceinline__ int batch_tiles() const { return tiles_left < batch ? tiles_left : batch; }
    __device__ __forceinline__ void next() {
        at += tile_stride;
        if (++tile < batch_tiles()) return;
        at += chunk_stride - tile * tile_stride;
        tile = 0;
        if (++pass < passes) return;
        at += batch_tiles() * tile_stride - passes * chunk_stride;
        pass = 0;
        tiles_left -= batch_tiles();
    }
};

// A lane's own activations of a chunk: for each group q of 8 / MP blocks, 8 neighbours of its row and block.
template <typename T, int MP>
__device__ __forceinline__ void fetch_activations(const GemvParams& p, int chunk, uint4 (&own)[MP]) {
    constexpr int kBlocks = 8 / MP;  // side by side in the columns
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = g % MP;
#pragma unroll
    for (int q = 0; q < MP; ++q) {
        const int64_t col = static_cast<int64_t>(chunk) * kTileCols + (q * kBlocks + g / MP) * kBlock + t * 8;
        const T* source = static_cast<const T*>(p.x) + row * p.cols + col;
        own[q] = make_uint4(0, 0, 0, 0);
        if (row < p.m && p.vector_x) {
            if (col < p.cols) own[q] = *reinterpret_cast<const uint4*>(source);
        } else if (row < p.m) {
            uint16_t e[8];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                e[i] = col + i < p.cols ? reinterpret_cast<const uint16_t*>(source)[i] : uint16_t{0};
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

// They as b-operands: b[block][2 * step + register], zero where the column is not the block's. The zeros stay in
// registers (the compiler would rather select them again in the loop).
template <int MP>
__device__ __forceinline__ void spread_activations(const uint4 (&own)[MP], uint32_t (&b)[8][4]) {
    constexpr int kBlocks = 8 / MP;
    const int mine = threadIdx.x % 32 / 4 / MP;
#pragma unroll
    for (int block = 0; block < 8; ++block) {
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

// Scales the sums of group q of blocks and adds them to `sum` (rows g, g, g+8, g+8).
template <int MP>
__device__ __forceinline__ void add_scaled(const float (&c)[4], const uint32_t* scales, int q, float (&sum)[4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if constexpr (MP == 1) {
        const uint32_t word = scales[4 * g + t];  // blocks 2t and 2t + 1, the lane's two columns
        sum[0] = c[0] * scale_value(word, 0) + c[1] * scale_value(word, 1);
        sum[2] = c[2] * scale_value(word, 2) + c[3] * scale_value(word, 3);
    } else {
        const int block = q * (8 / MP) + 2 * t / MP;
        const uint32_t word = scales[4 * g + block / 2] >> (8 * (block % 2));
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
__device__ __forceinline__ void multiply_record(const uint8_t* record, const Decode& decode, const uint32_t (&b)[8][4],
                                                float (&sum)[4]) {
    constexpr int kBlocks = 8 / MP;
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t w[4 * K];
#pragma unroll
    for (int j = 0; j < K; ++j) {
        const uint4 v = reinterpret_cast<const uint4*>(record)[j * 32 + threadIdx.x % 32];
        w[4 * j] = v.x, w[4 * j + 1] = v.y, w[4 * j + 2] = v.z, w[4 * j + 3] = v.w;
    }
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(record + Record<K>::kScaleOffset);
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
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
                add_scaled<MP>(even, scales, block / kBlocks, sum);
            }
        }
    }
}

// Adds the lanes that hold the same rows of x for different blocks, and leaves 16 * MP sums at out[row * MP + column].
template <int MP>
__device__ __forceinline__ void store_partial(float (&sum)[4], bool add, float* out) {
    const unsigned all = 0xFFFFFFFFu;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (MP == 1) {
        const float keep = t % 2 ? sum[2] : sum[0], send = t % 2 ? sum[0] : sum[2];
        float v = keep + __shfl_xor_sync(all, send, 1);
        v += __shfl_xor_sync(all, v, 2);
        float* to = out + g + 8 * t;
        if (t < 2) *to = add ? *to + v : v;
    } else if constexpr (MP == 2) {
        // after the first exchange lane t keeps row g (t < 2) or g + 8, after the second column t % 2
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
        for (int h = 0; h < 2; ++h) {
            float2* to = reinterpret_cast<float2*>(out + (g + 8 * h) * MP + t * 2);
            float2 v = make_float2(sum[2 * h], sum[2 * h + 1]);
            if (add) v.x += to->x, v.y += to->y;
            *to = v;
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_output(const GemvParams& p, int m, int64_t row, float v, int exponent) {
    v = multiply_exp2(v, exponent);
    if (p.bias) v += Pair<T>::to_float(static_cast<const T*>(p.bias)[row]);
    static_cast<T*>(p.y)[m * p.rows + row] = Pair<T>::from_float(v);
}

// Sums over the warps, in their order, for `tiles` row tiles from `tile` on; to y, or to the split's partial sums.
template <typename T, int MP>
__device__ __forceinline__ void sum_warps(const GemvParams& p, const float* sums, int64_t tile, int tiles, int split,
                                          int exponent) {
    const int warps = blockDim.x / 32;
    for (int i = threadIdx.x; i < tiles * kTileRows * MP; i += blockDim.x) {
        const int within = i % (kTileRows * MP);
        const float* from = sums + (i / (kTileRows * MP) * warps) * (kTileRows * MP) + within;
        float part[kGemvMaxWarps], v = 0.0f;
#pragma unroll
        for (int w = 0; w < kGemvMaxWarps; ++w) part[w] = w < warps ? from[w * kTileRows * MP] : 0.0f;
#pragma unroll
        for (int w = 0; w < kGemvMaxWarps; ++w) v += part[w];
        const int64_t row = (tile + i / (kTileRows * MP)) * kTileRows + within / MP;
        const int m = within % MP;
        if (m >= p.m || row >= p.rows) continue;
        if (p.splits == 1) {
            store_output<T>(p, m, row, v, exponent);
        } else {
            p.partial[(static_cast<int64_t>(split) * p.m + m) * p.rows + row] = v;
        }
    }
}

// The last CTA of a part to finish adds the splits in their order.
template <typename T>
__device__ __forceinline__ void sum_splits(const GemvParams& p, int part, int64_t tile, int tiles, int exponent) {
    __threadfence();
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
        last = atomicAdd(&p.counters[part], 1u) == static_cast<unsigned>(p.splits - 1);
        if (last) p.counters[part] = 0;
    }
    if (!__syncthreads_or(last)) return;
    __threadfence();
    for (int i = threadIdx.x; i < tiles * kTileRows * p.m; i += blockDim.x) {
        const int64_t row = tile * kTileRows + i % (tiles * kTileRows);
        const int m = i / (tiles * kTileRows);
        if (row >= p.rows) continue;
        float v = 0.0f;
        for (int s = 0; s < p.splits; ++s) v += __ldcg(&p.partial[(static_cast<int64_t>(s) * p.m + m) * p.rows + row]);
        store_output<T>(p, m, row, v, exponent);
    }
}

// K = 5 with many rows of x: a smaller table, so that sums of more than one row tile fit beside it.
template <int K, int MP>
constexpr int kGemvCopies = K == 5 && MP == 8 ? 16 : 32;

// Subtiles of four decoded in registers, measured on an H200.
template <int K>
constexpr int kGemvInRegisters = K == 2 ? 1 : 0;

template <typename T, int K, int MP, int Stages>
__global__ __launch_bounds__(kGemvMaxWarps * 32, 1) void gemv_kernel(const GemvParams p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) uint8_t shared[];
    check_table_base(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint8_t* const ring = shared + Table<K, kGemvCopies<K, MP>>::kBytes + warp * Stages * Record<K>::kBytes;
    float* const sums =
        reinterpret_cast<float*>(shared + Table<K, kGemvCopies<K, MP>>::kBytes + warps * Stages * Record<K>::kBytes);

    // Which row tiles, which chunks.
    const int split = blockIdx.x % p.splits, part = blockIdx.x / p.splits, group = part / p.parts;
    const int first = static_cast<int64_t>(part % p.parts) * p.tiles_per_group / p.parts;
    const int end = static_cast<int64_t>(part % p.parts + 1) * p.tiles_per_group / p.parts;
    const int64_t tile0 = static_cast<int64_t>(group) * p.tiles_per_group + first;
    const int chunk_step = warps * p.splits, chunk0 = split * warps + warp;
    const int passes = chunk0 < p.chunks ? (p.chunks - chunk0 + chunk_step - 1) / chunk_step : 0;

    RecordCursor cursor{p.tiles + (tile0 * p.chunks + chunk0) * Record<K>::kBytes + lane * 16,
                        static_cast<int64_t>(p.chunks) * Record<K>::kBytes,
                        static_cast<int64_t>(chunk_step) * Record<K>::kBytes,
                        end - first,
                        p.batch,
                        passes};
    int to_copy = (end - first) * passes;
    const uint32_t ring_address = shared_address(ring) + lane * 16;
    const auto copy_next = [&](int slot) {
        if (to_copy > 0) {
            const uint32_t to = ring_address + slot * Record<K>::kBytes;
#pragma unroll
            for (int j = 0; j < K; ++j) copy_async_16(to + j * 512, cursor.at + j * 512);
            copy_async_4(to + Record<K>::kScaleOffset - lane * 12, cursor.at + Record<K>::kScaleOffset - lane * 12);
            cursor.next();
            --to_copy;
        }
        copy_async_commit();
    };
    // What does not change (ops/repack.h) is read before the kernel ahead has ended: the codebook, which the table
    // waits for, goes ahead of the weights, or it would wait for all of those.
    const float level = lane < (1 << K) ? __ldcg(p.codebook + group * (1 << K) + lane) : 0.0f;
#pragma unroll
    for (int s = 0; s < Stages - 1; ++s) copy_next(s);
    launch_dependents();
    int exponent;
    const uint32_t kept = normalised_level<T, K>(level, exponent);
    fill_table<K, kGemvCopies<K, MP>>(kept, warp, warps);
    const Decoder<K, kGemvCopies<K, MP>, kGemvInRegisters<K>> decode(kept);
    wait_for_dependency();
    uint4 fetched[MP];
    if (passes > 0) fetch_activations<T, MP>(p, chunk0, fetched);
    if (MP <= 2 && p.vector_x) {
        for (int pass = 1; pass < passes; ++pass) touch_activations<T>(p, chunk0 + pass * chunk_step);
    }
    __syncthreads();

    constexpr bool kAhead =
        MP == 1;  // registers are left to fetch the next chunk's activations while this one's are used
    int slot = 0;
    for (int done = 0; done < end - first; done += p.batch) {
        const int tiles = min(p.batch, end - first - done);
        for (int pass = 0; pass < passes; ++pass) {
            uint32_t b[8][4];
            spread_activations<MP>(fetched, b);
            const int next_chunk = chunk0 + (pass + 1 < passes ? pass + 1 : 0) * chunk_step;
            if (kAhead && passes > 1) fetch_activations<T, MP>(p, next_chunk, fetched);
#pragma unroll 1
            for (int i = 0; i < tiles; ++i) {
                copy_async_wait<Stages - 2>();
                __syncwarp();
                copy_next(slot == 0 ? Stages - 1 : slot - 1);
                float sum[4];
                multiply_record<T, K, MP>(ring + slot * Record<K>::kBytes, decode, b, sum);
                store_partial<MP>(sum, pass > 0, sums + (i * warps + warp) * kTileRows * MP);
                slot = slot + 1 == Stages ? 0 : slot + 1;
            }
            if (!kAhead) fetch_activations<T, MP>(p, next_chunk, fetched);
        }
        if (passes == 0) {
            for (int i = lane; i < tiles * kTileRows * MP; i += 32) {
                sums[(i / (kTileRows * MP) * warps + warp) * kTileRows * MP + i % (kTileRows * MP)] = 0.0f;
            }
        }
        __syncthreads();
        sum_warps<T, MP>(p, sums, tile0 + done, tiles, split, exponent);
        if (done + p.batch < end - first) __syncthreads();
    }
    if (p.splits > 1) sum_splits<T>(p, part, tile0, end - first, exponent);
#else
    __trap();  // matmul_ready keeps callers from here
#endif
}

}  // namespace kbitq::matmul
