// y = x W^T for up to 16 rows of x: the tensor cores at M = 1.
//
// A CTA (one on each multiprocessor) has up to 16 warps, in one or more teams: a team has as many warps as it takes
// chunks of 256 columns at a time. A warp owns a chunk, so that the activations it needs stay in 32 registers (64 for
// 16 rows), while the records of its team's row tiles stream by: cp.async into a ring of its own (each thread reads
// back what it copied itself), four subtiles decoded and multiplied, one partial sum per row kept in shared memory.
// Warps meet only when a batch of row tiles is done; then the sums are added in the order of the chunks.
//
// CTAs may share the columns (`splits`): each then fetches only its part of x, which counts from 8 rows on and where W
// is wide. At the end their sums are added in the order of the CTAs: in a cluster each CTA reads the others' shared
// memory, on older cards the sums go through the workspace.
//
// mma has 8 columns for activations. With fewer rows of x the free columns hold *other blocks* of the same row: at M =
// 1, column n is block n of the chunk (the operand is zero outside it), so eight blocks accumulate without a scale
// between them, and a lane has to scale 4 sums for 128 weights instead of 32:
//
//     MP = 1   columns = 8 blocks            sums are scaled every 8 blocks
//     MP = 2   columns = 4 blocks x 2 rows   every 4
//     MP = 4   columns = 2 blocks x 4 rows   every 2
//     MP = 8   columns = 8 rows              every one
//     MP = 16  columns = 8 rows, twice       the weights are scaled instead
//
// Where a lane has whole blocks (format/tile_order.h), the four lanes of a row have four blocks in one mma, so columns
// must tell four blocks apart or the weights are scaled: there is no MP = 4, and at MP = 8 the weights are scaled.
//
// MP: rows of x that an instance has room for. Decoder: of a codec (codecs/planes_tiles.cuh).
#pragma once

#include "cuda/shared_base.cuh"
#include "ops/linear/tiled_few_sums.cuh"

namespace kbitq::tiled {

// A lane's own activations of a chunk: for each group q of 8 / MP blocks, 8 neighbours of its row and block (MP = 16:
// of row g, then of row g + 8).
template <typename T, int MP, bool WholeBlocks>
__device__ __forceinline__ void fetch_activations(const FewParams& p, int chunk, uint4 (&own)[MP]) {
    constexpr int kBlocks = MP < 8 ? 8 / MP : 1;  // side by side in the columns
    constexpr bool kTurned = WholeBlocks && MP >= 8;
    const int lane = threadIdx.x % 32, g = lane / 4;
    const int first = kTurned ? group_of_unit<true>(0, lane % 4) * 8 : g / MP * kBlock + lane % 4 * 8;
    const T* const source =
        static_cast<const T*>(p.x) + g % MP * p.cols + static_cast<int64_t>(chunk) * kTileCols + first;
#pragma unroll
    for (int q = 0; q < MP; ++q) {
        const int offset = kTurned ? group_of_unit<true>(q % 8, 0) * 8 : q % 8 * kBlocks * kBlock;
        const T* const from = source + q / 8 * 8 * p.cols + offset;
        own[q] = make_uint4(0, 0, 0, 0);
        if (g % MP + q / 8 * 8 >= p.m) continue;
        const int64_t col = static_cast<int64_t>(chunk) * kTileCols + first + offset;
        if (chunk < p.whole_chunks || (p.vector_x && col < p.cols)) {
            own[q] = *reinterpret_cast<const uint4*>(from);
        } else if (!p.vector_x) {
            own[q] = load_eight_in_row(from, col, p.cols);
        }
    }
}

// Brings a chunk's activations to the L1, so that fetching them later need not wait behind the weights.
template <typename T>
__device__ __forceinline__ void touch_activations(const FewParams& p, int chunk) {
    const int64_t col = static_cast<int64_t>(chunk) * kTileCols + threadIdx.x % 32 * 8;
    uint32_t ignored;
    for (int m = 0; m < p.m; ++m) {
        if (col >= p.cols) continue;
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(ignored) : "l"(static_cast<const T*>(p.x) + m * p.cols + col));
    }
}

// spread_activations where a lane has whole blocks: the lane whose block a column has gets all 32 activations of it,
// from the four lanes that fetched them. b[unit][2 * k-step + register]. Folded: operands 0 to 3 are those of both
// halves of the chunk, see FewLayout.
template <int MP, bool Folded>
__device__ __forceinline__ void spread_to_owners(const uint4 (&own)[MP], uint32_t (&b)[8][4]) {
    static_assert(MP <= 2 && (MP == 1 || !Folded));
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int q = 0; q < MP; ++q) {
        const uint32_t all[4] = {own[q].x, own[q].y, own[q].z, own[q].w};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const uint32_t value = __shfl_sync(0xFFFFFFFFu, all[r], g * 4 + m);
#pragma unroll
                for (int j = 0; j < (Folded ? 1 : 2); ++j) {
                    if (MP == 2 && j != q) continue;
                    const bool here = MP == 2 ? t == g / 2 : Folded ? t == g % 4 : 4 * j + t == g;
                    b[4 * j + m][r] = here ? value : 0;
                    asm volatile("" : "+r"(b[4 * j + m][r]));
                }
            }
        }
    }
}

// Makes b-operands of a lane's activations: b[block][2 * k-step + register], zero where the column is not the block's.
// The asm keeps the zeros in registers; without it the compiler selects them again in the loop.
template <class Decoder, int MP>
__device__ __forceinline__ void spread_activations(const uint4 (&own)[MP], uint32_t (&b)[kOperands<MP>][4]) {
    constexpr int kBlocks = MP < 8 ? 8 / MP : 1;
    if constexpr (Decoder::kWholeBlocks && MP < 8) return spread_to_owners<MP, FewLayout<Decoder, MP>::kFolded>(own, b);
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
template <class Decoder, int MP>
__device__ __forceinline__ void add_scaled(const Decoder& decoder, const float (&c)[4], uint32_t scales, int q,
                                           float (&sum)[4]) {
    const int t = threadIdx.x % 4;
    if constexpr (MP == 1) {
        RowScales even, odd;  // of blocks 2t and 2t + 1, the lane's two columns
        decoder.scales_of_subtile(scales, t, even, odd);
        sum[0] = c[0] * even.low + c[1] * odd.low;
        sum[2] = c[2] * even.high + c[3] * odd.high;
    } else {
        const RowScales scale = decoder.scales_of_block(scales, q * (8 / MP) + 2 * t / MP);
        sum[0] += c[0] * scale.low;
        sum[1] += c[1] * scale.low;
        sum[2] += c[2] * scale.high;
        sum[3] += c[3] * scale.high;
    }
}

// 16 x 256 weights times the chunk's activations. sum: rows g (0, 1) and g + 8 (2, 3), columns 2t and 2t + 1 of the
// operand (MP = 1: [0] and [2] only, both columns added).
template <typename T, int MP, class Decoder>
__device__ __forceinline__ void multiply_record(uint32_t own, uint32_t scales, const Decoder& decoder,
                                                const uint32_t (&b)[8][4], float (&sum)[1][4]) {
    constexpr bool kFolded = FewLayout<Decoder, MP>::kFolded;
    constexpr int kBlocks = 8 / MP, kChain = kFolded ? kBlocks / 2 : kBlocks;  // whose products go into one sum
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t w[Decoder::kWords];
    Decoder::load_words(own, w);
    sum[0][0] = sum[0][1] = sum[0][2] = sum[0][3] = 0.0f;
    float even[4], odd[4];  // two chains, so that mma need not wait for mma
    float first_half[4];
#pragma unroll
    for (int s = 0; s < kSubtiles; ++s) {
        uint32_t a[16];
        decoder.decode(w, s, a);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = 2 * s + i;
            const uint32_t (&operand)[4] = b[kFolded ? block % kChain : block];
            const bool first = block % kChain == 0;
            if (first) {
                Pair<T>::mma(even, a + 8 * i, operand, zero);
            } else {
                Pair<T>::mma(even, a + 8 * i, operand, even);
            }
            if (kBlocks == 1) {
                Pair<T>::mma(even, a + 8 * i + 4, operand + 2, even);
            } else if (first) {
                Pair<T>::mma(odd, a + 8 * i + 4, operand + 2, zero);
            } else {
                Pair<T>::mma(odd, a + 8 * i + 4, operand + 2, odd);
            }
            if (block % kChain != kChain - 1) continue;
            if (kBlocks > 1) {
#pragma unroll
                for (int r = 0; r < 4; ++r) even[r] += odd[r];
            }
            if (kFolded) {  // columns 0 to 3 are right after the first half, 4 to 7 after the second
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    if (block < kChain) {
                        first_half[r] = even[r];
                    } else {
                        even[r] = threadIdx.x % 4 < 2 ? first_half[r] : even[r];
                    }
                }
            }
            if (block % kBlocks == kBlocks - 1) add_scaled<Decoder, MP>(decoder, even, scales, block / kBlocks, sum[0]);
        }
    }
}

// The same for 8 N rows of x: weights are scaled before they are multiplied, sums go on over the whole record.
template <typename T, class Decoder, int Operands, int N>
__device__ __forceinline__ void multiply_scaled(uint32_t own, uint32_t scales, const Decoder& decoder,
                                                const uint32_t (&b)[Operands][4], float (&sum)[N][4]) {
    uint32_t w[Decoder::kWords];
    Decoder::load_words(own, w);
    uint32_t scale[kSubtiles];
    Decoder::load_scales(scales, scale);
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
#pragma unroll
    for (int s = 0; s < kSubtiles; ++s) {
        uint32_t a[16];
        decoder.decode(w, s, a);
        Decoder::template scale_weights<T>(scale[s], a);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                Pair<T>::mma(sum[n], a + 4 * step, b[8 * n + 2 * s + step / 2] + step % 2 * 2, sum[n]);
            }
        }
    }
}

// Which row tiles and which chunks this CTA and this warp have.
struct FewShare {
    int split, part, group;      // of the CTA
    int64_t tile0;               // its first row tile
    int tiles;                   // how many it has
    int team, teams, team_warp;  // of the warp; its number in the team
    int own_tiles, own_passes;   // row tiles of the team; chunks of the warp
    int chunk0, chunk_step;      // its first chunk; from one to the next
};

template <bool Totals>
__device__ __forceinline__ FewShare share_of(const FewParams& p) {
    FewShare s;
    const int warp = threadIdx.x / 32, split_shift = Totals ? p.split_shift : 0;
    s.teams = 1 << p.team_shift, s.team = warp & (s.teams - 1), s.team_warp = warp >> p.team_shift;
    s.split = blockIdx.x & ((1 << split_shift) - 1), s.part = blockIdx.x >> split_shift, s.group = blockIdx.y;
    const int first = s.part * p.part_tiles + min(s.part, p.longer);
    s.tiles = p.part_tiles + (s.part < p.longer);
    s.tile0 = static_cast<int64_t>(s.group) * p.tiles_per_group + first;
    s.own_tiles = (s.tiles - s.team + s.teams - 1) >> p.team_shift;
    s.chunk_step = p.team_warps << split_shift, s.chunk0 = s.split * p.team_warps + s.team_warp;
    s.own_passes = p.passes - (s.chunk0 + (p.passes - 1) * s.chunk_step >= p.chunks);
    return s;
}

// The records of a warp, in the order in which it copies them: for each of its chunks, its team's row tiles.
template <class Decoder>
class RecordStream {
  public:
    __device__ __forceinline__ RecordStream(const FewParams& p, const FewShare& s)
        : from_(p.tiles + ((s.tile0 + s.team) * p.chunks + s.chunk0) * Decoder::kRecordBytes + threadIdx.x % 32 * 16),
          own_tiles_(s.own_tiles),
          to_copy_(s.own_tiles * s.own_passes),
          tiles_to_copy_(s.own_tiles) {}

    // Begins to copy the next record, if there is one, to a slot of the ring; `slot` is this lane's address in it.
    __device__ __forceinline__ void copy_next(const FewParams& p, uint32_t slot) {
        if (to_copy_ > 0) {
            --to_copy_;
            Decoder::copy_record(slot, from_);
            from_ += p.tile_step;
            if (--tiles_to_copy_ == 0) {
                tiles_to_copy_ = own_tiles_;
                from_ += p.pass_step - own_tiles_ * p.tile_step;
            }
        }
        copy_async_commit();
    }

  private:
    const uint8_t* from_;
    int own_tiles_, to_copy_, tiles_to_copy_;
};

// Totals: CTAs share the columns, or sums are kept over several passes through a batch.
template <typename T, class Decoder, int MP, bool Totals>
__global__ __launch_bounds__(kFewMaxWarps * 32, 1) void few_kernel(const FewParams p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) uint8_t shared[];
    check_shared_base(shared);
    using Layout = FewLayout<Decoder, MP>;
    constexpr int kSums = kTileRows * MP, kBytes = Decoder::kRecordBytes, kStages = Layout::kStages;
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32, warps = blockDim.x / 32;
    uint8_t* const rings = shared + Decoder::kTableBytes;
    float* const totals = reinterpret_cast<float*>(rings + warps * kStages * kBytes);
    float* const sums = Totals ? totals + p.total_tiles * kSums : totals;
    const FewShare share = share_of<Totals>(p);
    const uint32_t ring = shared_address(rings) + warp * kStages * kBytes + thread * 16;
    RecordStream<Decoder> stream(p, share);

    // What does not change (ops/codec/repack.h) is read before the kernel ahead has ended: the codebook, which the
    // table waits for, goes ahead of the weights, or it would wait for all of those.
    const auto level = Decoder::load_level(p.codebook, share.group);
    // Many copies at once hold up what else is fetched: where the activations are next, all but one come after them.
    constexpr int kAtOnce = Layout::kAhead ? 1 : kStages - 1;
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) stream.copy_next(p, ring + s * kBytes);
    launch_dependents();
    int taken;
    const uint32_t kept = Decoder::template normalise<T, Layout::kScaledWeights>(level, taken);
    const int exponent = sums_exponent<T, Layout::kScaledWeights>(taken);
    Decoder::fill_table(kept, warp, warps);
    const Decoder decoder(kept);
    wait_for_dependency();
    constexpr bool kAhead = Layout::kAhead;
    uint4 fetched[MP] = {};
    if (kAhead && share.own_passes > 0) fetch_activations<T, MP, Decoder::kWholeBlocks>(p, share.chunk0, fetched);
    if (MP <= 2 && p.vector_x) {
        for (int pass = 1; pass < share.own_passes; ++pass)
            touch_activations<T>(p, share.chunk0 + pass * share.chunk_step);
    }
#pragma unroll
    for (int s = kAtOnce; s < kStages - 1; ++s) stream.copy_next(p, ring + s * kBytes);
    __syncthreads();

    const bool one_batch = share.tiles <= p.batch;
    const int to_scales = Decoder::scales_offset();
    uint32_t slot = ring, free_slot = ring + (kStages - 1) * kBytes;
    for (int pass = 0; pass < p.passes; ++pass) {
        const bool has_chunk = pass < share.own_passes;
        uint32_t b[kOperands<MP>][4];
        const int chunk = share.chunk0 + pass * share.chunk_step;
        if (!kAhead && has_chunk) fetch_activations<T, MP, Decoder::kWholeBlocks>(p, chunk, fetched);
        spread_activations<Decoder, MP>(fetched, b);
        if (kAhead && pass + 1 < share.own_passes)
            fetch_activations<T, MP, Decoder::kWholeBlocks>(p, chunk + share.chunk_step, fetched);
        for (int done = 0; done < share.tiles; done += p.batch) {
            const int these = min(p.batch, share.tiles - done);
            float* out = sums + (share.team * p.team_warps + share.team_warp) * kSums;
            if (has_chunk) {
#pragma unroll 1
                for (int i = share.team; i < these; i += share.teams) {
                    copy_async_wait<kStages - 2>();
                    __syncwarp();
                    stream.copy_next(p, free_slot);
                    const uint32_t record = fresh(slot);
                    float sum[kOperands<MP> / 8][4];
                    if constexpr (Layout::kScaledWeights) {
                        multiply_scaled<T>(record, record + to_scales, decoder, b, sum);
                    } else {
                        multiply_record<T, MP>(record, record + to_scales, decoder, b, sum);
                    }
                    store_partial<MP>(sum, pass > 0 && one_batch, out);
                    out += warps * kSums;
                    free_slot = slot;
                    slot = slot == ring + (kStages - 1) * kBytes ? ring : slot + kBytes;
                }
            } else if (pass == 0 || !one_batch) {
#pragma unroll 1
                for (int i = share.team; i < these; i += share.teams) {
                    for (int j = thread; j < kSums; j += 32) out[j] = 0.0f;
                    out += warps * kSums;
                }
            }
            if (one_batch && pass + 1 < p.passes) continue;
            __syncthreads();
            sum_warps<T, MP>(p, sums, share.tile0 + done, these, Totals ? totals + done * kSums : nullptr,
                             Totals && pass > 0 && !one_batch, exponent);
            if (!one_batch) __syncthreads();
        }
    }
    if constexpr (Totals) {
        store_totals<T, MP>(p, totals, share.tile0, share.tiles, share.split, exponent);
        if (p.split_shift > 0 && !p.cluster)
            sum_splits<T>(p, share.group * p.parts + share.part, share.tile0, share.tiles, exponent);
    }
#else
    __trap();  // tiled_linear_rows keeps callers from here
#endif
}

}  // namespace kbitq::tiled
