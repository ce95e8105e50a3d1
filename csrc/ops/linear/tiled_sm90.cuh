// y = x W^T for tens to hundreds of rows of x, on sm_90a: weights are decoded to registers, and wgmma takes them there.
//
// A warpgroup owns 64 rows of W, 16 for each warp, and all N rows of x that the CTA has; the `Warpgroups` of a CTA
// share the x that it stages. wgmma runs beside the warps: while a subtile of 64 columns is being multiplied, the next
// is decoded into other registers, so that the tensor cores need not wait as long as decoding takes less time.
//
//     warp         decode 0 | decode 1  | decode 2  |          one subtile each, to 16 registers, scaled
//     tensor core           | subtile 0 | subtile 1 | ...
//
// Weights arrive by cp.async: each warp has a ring of kStages records. x arrives by the copy engine, in pieces of
// kPieceCols columns, through kSlots slots: a "full" barrier says that a piece is there, an "empty" one that every warp
// is done with it. No barrier holds up all warps, so that some decode while others multiply.
//
// A small kernel (arrange) first brings x into the order of the slots. There, the k of wgmma are in the order of the
// weights (format/tile_order.h): lane t of a row holds elements 8t .. 8t+7 of a block, two neighbours in a register:
//
//     x, a row of a block  |  0..7 (t = 0)  |  8..15 (1)  |  16..23 (2)  |  24..31 (3)  |   pairs j = 0..3 in each
//     core j               |  pair j of t = 0, 1, 2, 3  |   j = 2 * k-step + half of the k-step, 16 bytes a row of x
//
// So a row's part of core j is word j of each of its four groups of 16 bytes. A core is 8 of k for all N rows, and
// cores follow one another: what a CTA needs of x at a time is contiguous.
#pragma once

#include "cuda/shared_base.cuh"
#include "cuda/wgmma.cuh"
#include "ops/linear/tiled_share.cuh"

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
    static constexpr uint32_t kBarriers = kSharedBase + Decoder::kTableBytes;  // shared addresses
    static constexpr uint32_t kPieces = kBarriers + kBarrierBytes;
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

// A thread brings a row of a block to its place: of four units, one of each lane (format/tile_order.h).
template <typename T, bool WholeBlocks>
__global__ __launch_bounds__(kArrangeThreads) void arrange_kernel(const ArrangeParams p) {
    launch_dependents();
    const int unit = blockIdx.x * kArrangeThreads + threadIdx.x, row = unit % p.n, block = unit / p.n;
    wait_for_dependency();
    if (block >= p.blocks) return;
    const T* from = static_cast<const T*>(p.x) + static_cast<int64_t>(row) * p.cols;
    uint4 v[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const int64_t col = static_cast<int64_t>(block / kTileBlocks) * kTileCols +
                            group_of_unit<WholeBlocks>(block % kTileBlocks, t) * 8;
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

// The pieces of x that a CTA needs, on their way through its slots: piece i through slot i % kSlots. One thread has
// them copied; every warp that works waits for a piece and releases it.
template <class Layout>
struct PieceQueue {
    static constexpr int kSlots = Layout::kSlots, kSlotBytes = Layout::kSlotBytes;
    const uint8_t* pieces;  // the first one, in global memory
    int count;

    static __device__ __forceinline__ uint32_t full(int slot) { return Layout::kBarriers + slot * 8; }
    static __device__ __forceinline__ uint32_t empty(int slot) { return Layout::kBarriers + (kSlots + slot) * 8; }

    // By one thread, before any other uses the queue; `warps` will release each piece.
    static __device__ __forceinline__ void init(int warps) {
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), warps);
        }
        barrier_init_fence();
    }
    // Begins to copy a piece, by one thread, once its slot is free.
    __device__ __forceinline__ void copy(int piece) const {
        const int slot = piece % kSlots;
        if (piece >= kSlots) barrier_wait(empty(slot), (piece / kSlots - 1) & 1);
        copy_bulk(address(piece), pieces + static_cast<int64_t>(piece) * kSlotBytes, kSlotBytes, full(slot));
    }
    static __device__ __forceinline__ void wait(int piece) { barrier_wait(full(piece % kSlots), piece / kSlots & 1); }
    // By one lane of each warp.
    static __device__ __forceinline__ void release(int piece) { barrier_arrive(empty(piece % kSlots)); }
    static __device__ __forceinline__ uint32_t address(int piece) {
        return Layout::kPieces + piece % kSlots * kSlotBytes;
    }
};

// p.x: what arrange_kernel has made of x.
template <typename T, class Decoder, int N, int Warpgroups>
__global__ __launch_bounds__(Warpgroups * 128, 1) void sm90_kernel(const TiledParams p) {
#if KBITQ_WGMMA
    using Layout = Sm90Layout<Decoder, N, Warpgroups>;
    constexpr int kStages = Layout::kStages, kSlots = Layout::kSlots;
    constexpr int kPieces = kTileCols / Layout::kPieceCols, kPieceSubtiles = Layout::kPieceCols / 64;
    extern __shared__ __align__(1024) uint8_t shared[];
    check_shared_base(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t ring = kSharedBase + Layout::kFixed + warp * kStages * Decoder::kRecordBytes + lane * 16;
    const TiledShare share = share_of<1>(p, warp, Layout::kWarps);
    const bool exists = share.tile_in_group < p.tiles_per_group;
    // Warps that work: whole warpgroups.
    const int working = min(Layout::kWarps, (p.tiles_per_group - share.first_tile + 3) / 4 * 4);
    const uint8_t* const records = p.tiles + (share.tile * p.chunks + share.first) * Decoder::kRecordBytes + lane * 16;

    const auto copy_weights = [&](int chunk, int slot) {
        if (chunk < share.end && exists) {
            const uint8_t* from = records + static_cast<int64_t>(chunk - share.first) * Decoder::kRecordBytes;
            Decoder::copy_record(ring + slot * Decoder::kRecordBytes, from);
        }
        copy_async_commit();
    };

    // Weights and codebook do not change (ops/codec/repack.h) and are read before the kernel ahead has ended; x is its
    // result.
    const auto level = Decoder::load_level(p.codebook, share.group);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) copy_weights(share.first + s, s);
    launch_dependents();
    if (threadIdx.x == 0) PieceQueue<Layout>::init(working);
    int taken;
    const uint32_t kept = Decoder::template normalise<T, true>(level, taken);
    Decoder::fill_table(kept, warp, Layout::kWarps);
    const Decoder decoder(kept);
    __syncthreads();
    if (warp >= working) return;

    const uint8_t* const x = static_cast<const uint8_t*>(p.x);
    const PieceQueue<Layout> queue{x + static_cast<int64_t>(share.first) * kPieces * Layout::kSlotBytes,
                                   (share.end - share.first) * kPieces};
    if (threadIdx.x == 0) {
        wait_for_dependency();
        for (int i = 0; i < min(queue.count, kSlots - 2); ++i) queue.copy(i);
    }

    float sum[N / 8][4] = {};
    int slot = 0, piece = 0;
#pragma unroll 1
    for (int chunk = share.first; chunk < share.end; ++chunk) {
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
            if (s % kPieceSubtiles == 0) {
                // The piece kSlots - 2 further on goes where the piece before the last one was. Every warp is done with
                // that, or will be before it needs the next piece.
                if (threadIdx.x == 0 && piece + kSlots - 2 < queue.count) queue.copy(piece + kSlots - 2);
                __syncwarp();
                queue.wait(piece);
            }
            const uint32_t at = queue.address(piece) + s % kPieceSubtiles * 8 * Layout::kCoreBytes;
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                Wgmma<T, N>::multiply(sum, a + 4 * step,
                                      wgmma_descriptor(at + step * 2 * Layout::kCoreBytes, Layout::kCoreBytes));
            }
            wgmma_commit();
            wgmma_wait<1>();  // the subtile before is done, and with it the piece before if this one begins a piece
            if (s % kPieceSubtiles == 0 && piece > 0 && lane == 0) queue.release(piece - 1);
            if (s % kPieceSubtiles == kPieceSubtiles - 1) ++piece;
        }
        slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    wgmma_wait<0>();
    wgmma_done(sum);
    copy_async_wait<0>();
    if (!exists) return;
    if (p.splits > 1 && !gather_splits<N / 8>(p, share.block * Layout::kWarps + warp, share.split, sum)) return;
    store_tile<T, N / 8>(p, static_cast<T*>(p.y), share.tile * kTileRows, 0, p.m, sums_exponent<T, true>(taken), sum);
#else
    __trap();  // tiled_sm90_cuda.cu keeps callers from here
#endif
}

}  // namespace kbitq::tiled
