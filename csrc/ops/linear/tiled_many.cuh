// y = x W^T for tens of rows of x, and for experts: weights are decoded in registers and multiplied by 8 * NT rows of
// x.
//
// A CTA has up to 8 warps of two row tiles each (NT = 1: up to 16 of one), and walks along a range of chunks of 256
// columns. Every warp copies its own records of a chunk, and all warps together copy the activations, `kStages` chunks
// ahead (cp.async, one barrier a chunk). A subtile of 64 columns is decoded, multiplied by its scales (rounded to T, as
// a dequantized weight is) and used for NT column tiles of mma; two row tiles share each load of activations. Sums stay
// in registers.
//
//     shared memory:  table | ring: warps x kStages x kTiles records | kStages x 8*NT rows of activations + 64 bytes
//
// The 64 bytes put neighbouring rows half the banks apart, so that the 16-byte loads of b-operands do not collide.
// Where there are few row tiles, `splits` CTAs share the columns; the last warp to arrive at its row tiles adds up what
// all of them left in the workspace, in their order.
#pragma once

#include "cuda/shared_base.cuh"
#include "ops/linear/tiled_share.cuh"

namespace kbitq::tiled {

constexpr int kManyTilesPerBlock = 16;  // row tiles of a CTA at most
static_assert(kManyTilesPerBlock * kTileRows * kManyRows <= kWorkspaceSums);

template <class Decoder, int NT>
struct ManyLayout {
    static constexpr int kTiles = NT == 1 ? 1 : 2;  // row tiles of a warp
    static constexpr int kMaxWarps = kManyTilesPerBlock / kTiles;
    static constexpr int kRowBytes = kTileCols * 2 + 64;
    static constexpr int kActivations = 8 * NT * kRowBytes;
    static constexpr int kStageBytes = kMaxWarps * kTiles * Decoder::kRecordBytes + kActivations;
    static constexpr int kFit = (kBlockShared - Decoder::kTableBytes) / kStageBytes;
    static constexpr int kStages = kFit > 4 ? 4 : kFit;
    static_assert(kStages >= 2);
    static constexpr int bytes(int warps) {
        return Decoder::kTableBytes + kStages * (warps * kTiles * Decoder::kRecordBytes + kActivations);
    }
};

// Copies the columns of one chunk of 8 * NT rows of x, from row m0 on, to shared memory; zeros past the ends. All
// threads take part: a warp copies a row, in the order of units (format/tile_order.h).
template <typename T, int NT, int RowBytes, bool WholeBlocks>
__device__ __forceinline__ void copy_activations(const TiledParams& p, const T* x, int64_t m0, int64_t m, int chunk,
                                                 uint8_t* to) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, unit = group_of_unit<WholeBlocks>(lane / 4, lane % 4);
    const int64_t col = static_cast<int64_t>(chunk) * kTileCols + lane * 8;
    for (int line = threadIdx.x / 32; line < 8 * NT; line += warps) {
        uint8_t* const place = to + line * RowBytes + unit * 16;
        const bool inside = m0 + line < m && col < p.cols;
        const T* const source = x + (inside ? (m0 + line) * p.cols + col : 0);
        if (p.vector_x) {
            copy_async_16(shared_address(place), source, inside ? 16 : 0);
        } else {
            *reinterpret_cast<uint4*>(place) = load_eight_in_row(source, inside ? col : p.cols, p.cols);
        }
    }
}

// sum[tile][n] += 16 x 256 weights times the activations of column tile n, for each row tile of the warp. `own` and
// `scales`: shared addresses of the lane's words in the first record and of the scales of its rows.
template <typename T, int NT, class Decoder, int Tiles>
__device__ __forceinline__ void multiply_chunk(uint32_t own, uint32_t scales, const uint8_t* x, const Decoder& decoder,
                                               float (&sum)[Tiles][NT][4]) {
    constexpr int kRowBytes = ManyLayout<Decoder, NT>::kRowBytes, kSideBySide = NT < 4 ? NT : 4;
    const uint8_t* fragment = x + threadIdx.x % 32 / 4 * kRowBytes + threadIdx.x % 4 * 16;
    uint32_t w[Tiles][Decoder::kWords];
#pragma unroll
    for (int r = 0; r < Tiles; ++r) Decoder::load_words(own + r * Decoder::kRecordBytes, w[r]);
#pragma unroll
    for (int s = 0; s < kSubtiles; ++s) {
        uint32_t a[Tiles][16];
#pragma unroll
        for (int r = 0; r < Tiles; ++r) {
            decoder.decode(w[r], s, a[r]);
            Decoder::template scale_weights<T>(Decoder::load_scale(scales + r * Decoder::kRecordBytes, s), a[r]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int n = 0; n < NT; n += kSideBySide) {
                uint4 b[kSideBySide];
#pragma unroll
                for (int j = 0; j < kSideBySide; ++j) {
                    b[j] =
                        *reinterpret_cast<const uint4*>(fragment + (n + j) * 8 * kRowBytes + (2 * s + i) * kBlock * 2);
                }
#pragma unroll
                for (int step = 0; step < 2;
                     ++step) {  // an mma waits for the one before on the same sum: others go between
#pragma unroll
                    for (int j = 0; j < kSideBySide; ++j) {
                        const uint32_t half[2] = {step ? b[j].z : b[j].x, step ? b[j].w : b[j].y};
#pragma unroll
                        for (int r = 0; r < Tiles; ++r) {
                            Pair<T>::mma(sum[r][n + j], a[r] + 8 * i + 4 * step, half, sum[r][n + j]);
                        }
                    }
                }
            }
        }
    }
}

template <typename T, class Decoder, int NT>
__global__ __launch_bounds__(ManyLayout<Decoder, NT>::kMaxWarps * 32, 1) void many_kernel(const TiledParams p) {
#if __CUDA_ARCH__ >= 800
    using Layout = ManyLayout<Decoder, NT>;
    constexpr int kStages = Layout::kStages, kTiles = Layout::kTiles, kSlotBytes = kTiles * Decoder::kRecordBytes;
    extern __shared__ __align__(1024) uint8_t shared[];
    check_shared_base(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const uint32_t ring = shared_address(shared) + Decoder::kTableBytes + warp * kStages * kSlotBytes + lane * 16;
    const int to_scales = Decoder::scales_offset();
    uint8_t* const staged = shared + Decoder::kTableBytes + warps * kStages * kSlotBytes;

    const TiledShare share = share_of<kTiles>(p, warp, warps);
    const int tiles =
        min(kTiles, p.tiles_per_group - share.tile_in_group);  // that exist; if none, the warp only copies x
    const uint8_t* const records = p.tiles + (share.tile * p.chunks + share.first) * Decoder::kRecordBytes + lane * 16;

    // Weights and codebook do not change (ops/codec/repack.h) and are read before the kernel ahead has ended; x and
    // offsets are its results.
    const auto level = Decoder::load_level(p.codebook, share.group);
    launch_dependents();
    if (p.offsets) wait_for_dependency();
    const int expert = share.group / p.groups_per_expert;
    const int64_t begin_m = p.offsets ? p.offsets[expert] : 0;
    const int64_t m = p.offsets ? p.offsets[expert + 1] - begin_m : p.m;
    if (m <= 0) return;
    const T* const x = static_cast<const T*>(p.x) + begin_m * p.cols;
    int taken;
    const uint32_t kept = Decoder::template normalise<T, true>(level, taken);
    const Decoder decoder(kept);

    const auto copy_weights = [&](int chunk, int slot) {
        if (chunk >= share.end) return;
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
            if (r >= tiles) continue;
            const uint8_t* from =
                records + (static_cast<int64_t>(r) * p.chunks + chunk - share.first) * Decoder::kRecordBytes;
            Decoder::copy_record(ring + slot * kSlotBytes + r * Decoder::kRecordBytes, from);
        }
    };
    const auto copy_x = [&](int chunk, int slot, int64_t m0) {
        if (chunk < share.end)
            copy_activations<T, NT, Layout::kRowBytes, Decoder::kWholeBlocks>(p, x, m0, m, chunk,
                                                                              staged + slot * Layout::kActivations);
        copy_async_commit();
    };

    for (int64_t m0 = 0; m0 < m; m0 += 8 * NT) {  // more than once only for an expert with many rows
#pragma unroll
        for (int s = 0; s < kStages - 1; ++s) copy_weights(share.first + s, s);
        if (m0 == 0) {
            Decoder::fill_table(kept, warp, warps);
            wait_for_dependency();
        }
#pragma unroll
        for (int s = 0; s < kStages - 1; ++s) copy_x(share.first + s, s, m0);
        float sum[kTiles][NT][4] = {};
        int slot = 0;
#pragma unroll 1
        for (int chunk = share.first; chunk < share.end; ++chunk) {
            copy_async_wait<kStages - 2>();
            __syncthreads();
            const int free_slot = slot == 0 ? kStages - 1 : slot - 1;
            copy_weights(chunk + kStages - 1, free_slot);
            copy_x(chunk + kStages - 1, free_slot, m0);
            if (tiles > 0) {
                const uint32_t record = fresh(ring + slot * kSlotBytes);
                multiply_chunk<T, NT>(record, record + to_scales, staged + slot * Layout::kActivations, decoder, sum);
            }
            slot = slot + 1 == kStages ? 0 : slot + 1;
        }
        copy_async_wait<0>();
        __syncthreads();
        if (tiles <= 0) continue;
        if (p.splits > 1) {
            float (&all)[kTiles * NT][4] = reinterpret_cast<float (&)[kTiles * NT][4]>(sum);
            if (!gather_splits<kTiles * NT>(p, share.block * warps + warp, share.split, all)) continue;
        }
        const int64_t row0 =
            (share.tile - static_cast<int64_t>(expert) * p.groups_per_expert * p.tiles_per_group) * kTileRows;
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
            if (r >= tiles) continue;
            store_tile<T, NT>(p, static_cast<T*>(p.y) + begin_m * p.rows, row0 + r * kTileRows, m0, m,
                              sums_exponent<T, true>(taken), sum[r]);
        }
    }
#else
    __trap();  // tiled_linear_rows keeps callers from here
#endif
}

}  // namespace kbitq::tiled
