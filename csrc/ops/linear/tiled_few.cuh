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

#include "codecs/planes_record.cuh"
#include "ops/linear/tiled_few_sums.cuh"

namespace kbitq::matmul {

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
