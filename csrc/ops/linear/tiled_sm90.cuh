// y = x W^T for tens to hundreds of rows of x, on sm_90a: weights decoded in registers, where wgmma takes them from.
//
// A warpgroup owns 64 rows of W, 16 a warp, and all N rows of x that the CTA has; `Warpgroups` of them share the x that
// the CTA stages. wgmma runs beside the warps: while a subtile of 64 columns is being multiplied, the next is decoded
// into other registers, so that the tensor cores wait for nobody as long as decoding is the shorter part.
//
//     warp         decode 0 | decode 1  | decode 2  |          one subtile each: K words to 16 registers, scaled
//     tensor core           | subtile 0 | subtile 1 | ...
//
// Weights arrive by cp.async, a ring for each warp, kStages chunks of 256 columns deep. x arrives by the copy engine,
// in pieces of kPieceCols columns, kSlots of them: "full" barriers say that a piece is there, "empty" ones that every
// warp is done with it. No barrier holds up all warps, so that some decode while others multiply.
//
// A small kernel first brings x into the order of the slots. There, the k of wgmma are in the order of the weights
// (format/tile_order.h): lane t of a row holds elements 8t .. 8t+7 of a block, two neighbours a register, so that
//
//     x, a row of a block  |  0..7 (t = 0)  |  8..15 (1)  |  16..23 (2)  |  24..31 (3)  |   pairs j = 0..3 in each
//     core j               |  pair j of t = 0, 1, 2, 3  |   j = 2 * k-step + half of the k-step, 16 bytes a row of x
//
// a row's part of core j is word j of each of four 16-byte pieces. A core is 8 of k for all N rows, cores follow one
// another: what a CTA needs of x at a time is contiguous.
#pragma once

#include "cuda/wgmma.cuh"
#include "ops/linear/tiled_many.cuh"

namespace kbitq::tiled {

constexpr int kCoreCols = 8;

template <class Decoder, int N, int Warpgroups>
struct Sm90Layout {
    static constexpr int kThreads = Warpgroups * 128;
    static constexpr int kWarps = Warpgroups * 4;
    static constexpr int kSlots = N > 128 ? 3 : 4;
    static constexpr int kPieceCols = N > 64 ? 64 : 128;
    static constexpr int kCoreBytes = N * 16;
    static constexpr int kSlotBytes = kPieceCols / kCoreCols * kCoreBytes;
    static constexpr int kBarrierBytes = 1024;  // keeps what follows aligned
    static constexpr int kStageBytes = kWarps * Decoder::kRecordBytes;
    static constexpr int kFixed = Decoder::kTableBytes + kBarrierBytes + kSlots * kSlotBytes;
    static constexpr int kFit = (kBlockShared - kFixed) / kStageBytes;
    static constexpr int kStages = kFit > 4 ? 4 : kFit;
    static_assert(kStages >= 2);
    static constexpr int kBytes = kFixed + kStages * kStageBytes;
};

constexpr int kArrangeThreads = 128;

struct ArrangeParams {
    const void* x;  // [m, cols]
    uint4* out;     // [blocks of columns][4 cores][n]
    int64_t cols;
    int m, n, blocks;
    bool vector_x;
};

// A thread brings a row of a block to its place.
template <typename T>
__global__ __launch_bounds__(kArrangeThreads) void arrange_kernel(const ArrangeParams p) {
    launch_dependents();
    const int unit = blockIdx.x * kArrangeThreads + threadIdx.x, row = unit % p.n, block = unit / p.n;
    wait_for_dependency();
    if (block >= p.blocks) return;
    const T* from = static_cast<const T*>(p.x) + static_cast<int64_t>(row) * p.cols;
    uint4 v[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const int64_t col = static_cast<int64_t>(block) * kBlock + t * 8;
        v[t] = make_uint4(0, 0, 0, 0);
        if (row >= p.m) continue;
        if (p.vector_x) {
            if (col < p.cols) v[t] = *reinterpret_cast<const uint4*>(from + col);
        } else {
            v[t] = load_eight_in_row(from + col, col, p.cols);
        }
    }
    uint4* to = p.out + static_cast<int64_t>(block) * 4 * p.n + row;
    to[0] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
    to[p.n] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    to[2 * p.n] = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
    to[3 * p.n] = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
}

// p.x is what arrange_kernel made.
template <typename T, class Decoder, int N, int Warpgroups>
__global__ __launch_bounds__(Warpgroups * 128, 1) void sm90_kernel(const ManyParams p) {
#if KBITQ_WGMMA
    using Layout = Sm90Layout<Decoder, N, Warpgroups>;
    constexpr int kStages = Layout::kStages, kSlots = Layout::kSlots, kSlotBytes = Layout::kSlotBytes;
    constexpr int kPieces = kTileCols / Layout::kPieceCols, kPieceSubtiles = Layout::kPieceCols / 64;
    extern __shared__ __align__(1024) uint8_t shared[];
    check_shared_base(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t barriers = kSharedBase + Decoder::kTableBytes;
    const uint32_t staged = barriers + Layout::kBarrierBytes;
    const uint32_t ring = kSharedBase + Layout::kFixed + warp * kStages * Decoder::kRecordBytes + lane * 16;
    const auto full = [&](int slot) { return barriers + slot * 8; };
    const auto empty = [&](int slot) { return barriers + (kSlots + slot) * 8; };

    // Which row tiles, which chunks.
    const int split = blockIdx.x % p.splits, block = blockIdx.x / p.splits, group = block / p.blocks_per_group;
    const int first_tile = block % p.blocks_per_group * Layout::kWarps, tile_in_group = first_tile + warp;
    const bool exists = tile_in_group < p.tiles_per_group;
    const int working = min(Layout::kWarps, (p.tiles_per_group - first_tile + 3) / 4 * 4);  // warps, by warpgroups
    const int64_t tile = static_cast<int64_t>(group) * p.tiles_per_group + tile_in_group;
    const int first = static_cast<int64_t>(split) * p.chunks / p.splits,
              end = static_cast<int64_t>(split + 1) * p.chunks / p.splits;
    const uint8_t* const records = p.tiles + (tile * p.chunks + first) * Decoder::kRecordBytes + lane * 16;

    const auto copy_weights = [&](int chunk, int slot) {
        if (chunk < end && exists) {
            const uint8_t* from = records + static_cast<int64_t>(chunk - first) * Decoder::kRecordBytes;
            Decoder::copy_record(ring + slot * Decoder::kRecordBytes, from);
        }
        copy_async_commit();
    };

    // Weights and codebook do not change (ops/codec/repack.h) and are read before the kernel ahead has ended; x is its
    // result.
    const float level = Decoder::load_level(p.codebook, group);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) copy_weights(first + s, s);
    launch_dependents();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), working);
        }
        barrier_init_fence();
    }
    int taken;
    const uint32_t kept = Decoder::template normalise<T, true>(level, taken);
    Decoder::fill_table(kept, warp, Layout::kWarps);
    const Decoder decoder(kept);
    __syncthreads();
    if (warp >= working) return;

    // One thread has x brought: piece i of this CTA's to slot i % kSlots.
    const uint8_t* const pieces = static_cast<const uint8_t*>(p.x) + static_cast<int64_t>(first) * kPieces * kSlotBytes;
    const int count = (end - first) * kPieces;
    const auto copy_x = [&](int piece) {
        const int slot = piece % kSlots;
        if (piece >= kSlots) barrier_wait(empty(slot), (piece / kSlots - 1) & 1);
        copy_bulk(staged + slot * kSlotBytes, pieces + static_cast<int64_t>(piece) * kSlotBytes, kSlotBytes,
                  full(slot));
    };
    if (threadIdx.x == 0) {
        wait_for_dependency();
        for (int i = 0; i < min(count, kSlots - 2); ++i) copy_x(i);
    }

    float sum[N / 8][4] = {};
    int slot = 0, piece = 0;
#pragma unroll 1
    for (int chunk = first; chunk < end; ++chunk) {
        copy_async_wait<kStages - 2>();
        __syncwarp();
        copy_weights(chunk + kStages - 1, slot == 0 ? kStages - 1 : slot - 1);
        const uint32_t own = fresh(ring + slot * Decoder::kRecordBytes), scales = own + Decoder::scales_offset();
        uint32_t w[Decoder::kWords];
        Decoder::load_words(own, w);
#pragma unroll
        for (int s = 0; s < kSubtiles; ++s) {
            uint32_t a[16];
            decoder.decode(w, s, a);
            Decoder::template scale_weights<T>(Decoder::load_scale(scales, s), a);
            const int x_slot = piece % kSlots;
            if (s % kPieceSubtiles == 0) {
                // The copy of kSlots - 2 pieces on goes where the piece before the last was: every warp is done with
                // that, or will be before it needs the next one.
                if (threadIdx.x == 0 && piece + kSlots - 2 < count) copy_x(piece + kSlots - 2);
                __syncwarp();
                barrier_wait(full(x_slot), piece / kSlots & 1);
            }
            const uint32_t at = staged + x_slot * kSlotBytes + s % kPieceSubtiles * 8 * Layout::kCoreBytes;
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                Wgmma<T, N>::multiply(sum, a + 4 * step,
                                      wgmma_descriptor(at + step * 2 * Layout::kCoreBytes, Layout::kCoreBytes));
            }
            wgmma_commit();
            wgmma_wait<1>();  // the subtile before is done, and with it the piece before if this one begins a piece
            if (s % kPieceSubtiles == 0 && piece > 0 && lane == 0) barrier_arrive(empty((piece - 1) % kSlots));
            if (s % kPieceSubtiles == kPieceSubtiles - 1) ++piece;
        }
        slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    wgmma_wait<0>();
    wgmma_done(sum);
    copy_async_wait<0>();
    if (!exists) return;
    if (p.splits > 1 && !gather_splits<N / 8>(p, block * Layout::kWarps + warp, split, sum)) return;
    store_tile<T, N / 8>(p, static_cast<T*>(p.y), tile * kTileRows, 0, p.m, sums_exponent<T, true>(taken), sum);
#else
    __trap();  // tiled_sm90_cuda.cu keeps callers from here
#endif
}

}  // namespace kbitq::tiled
