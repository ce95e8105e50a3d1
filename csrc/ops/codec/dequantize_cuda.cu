// dequantize on the GPU: mostly writes (2 of 2 + K/8 bytes a value), so the stores are whole: a lane makes eight
// neighbours of a block and writes them at once, a warp 256 of a row.
//
//     lane      0        1         2         3     | 4 ..        four lanes a block, eight blocks a step
//     elements  0..7     8..15     16..23    24..31              each reads the block's words, all in one transaction
//
// The codec (codecs/planes.cuh, trellis.cuh) makes eight indices of the words, in one or two registers. Up to 32 levels
// live one in each lane, where a shuffle fetches them; more lie in shared memory.
#include <cuda_pipeline_primitives.h>

#include "codecs/block_scale.cuh"
#include "codecs/dispatch.cuh"
#include "codecs/level_table.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "ops/codec/dequantize.h"

namespace kbitq {
namespace {

constexpr int kThreads = kLevelTableThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kStripBlocks = 8;  // of one step of a warp
constexpr int kStepsAhead = 4;   // steps of a warp, whose loads are issued together
constexpr int kWarpBlocks = kStripBlocks * kStepsAhead;
static_assert(kWarpBlocks == 32, "each lane loads the scale of one block");

// Elements first .. first + 7 of a block as far as its row has them; `aligned`: eight may be stored at once.
template <typename T>
__device__ __forceinline__ void store_in_row(const DequantizeArgs& a, int64_t block, int first, bool aligned,
                                             const float (&v)[8]) {
    const int64_t nblk = blocks_per_row(a.packed.cols), row = block_row(block, nblk);
    const int64_t column = (block - row * nblk) * kBlock + first;
    T* p = static_cast<T*>(a.out) + row * a.packed.cols + column;
    store_eight_in_row(p, v, a.packed.cols - column, aligned);
}

// A warp's blocks, `start` being its first, where all of them exist and follow each other in `out` without a gap,
// 16-byte aligned like packed. The words come through shared memory, so that each sector is asked for once and few
// registers wait.
template <class Codec, typename T, bool kFloatScale>
__device__ __forceinline__ void decode_gapless(const DequantizeArgs& a, const LevelTable<Codec::kIndexBits>& levels,
                                               uint4* staged, int64_t start) {
    constexpr int K = Codec::kWords;
    const int lane = threadIdx.x & 31;
    const auto* source = reinterpret_cast<const uint4*>(a.packed.words + start * K);
#pragma unroll
    for (int c = 0; c < kWarpBlocks * K / 4; c += 32) {
        if (c + lane < kWarpBlocks * K / 4) __pipeline_memcpy_async(staged + c + lane, source + c + lane, 16);
    }
    __pipeline_commit();
    const float scales = load_scale<Codec, kFloatScale>(a.packed, start + lane);  // of block `lane`
    __pipeline_wait_prior(0);
    __syncwarp();
#pragma unroll
    for (int u = 0; u < kStepsAhead; ++u) {
        const int block = u * kStripBlocks + lane / 4;
        uint32_t w[K];
        float v[8];
        read_words<K>(w, reinterpret_cast<const uint32_t*>(staged) + block * K);
        decode_eight<Codec>(v, w, levels, __shfl_sync(~0u, scales, block));
        store_eight(static_cast<T*>(a.out) + (start + block) * kBlock + (lane & 3) * 8, v);
    }
}

// A warp's blocks, each found by its row. All lanes take part in every shuffle.
template <class Codec, typename T, bool kFloatScale>
__device__ __forceinline__ void decode_by_row(const DequantizeArgs& a, const LevelTable<Codec::kIndexBits>& levels,
                                              int64_t start, int64_t blocks, bool aligned) {
    constexpr int K = Codec::kWords;
    for (int u = 0; u < kStepsAhead; ++u) {
        const int64_t block = start + u * kStripBlocks + (threadIdx.x & 31) / 4, there = min(block, blocks - 1);
        uint32_t w[K];
        float v[8];
#pragma unroll
        for (int j = 0; j < K; ++j) w[j] = a.packed.words[there * K + j];
        decode_eight<Codec>(v, w, levels, load_scale<Codec, kFloatScale>(a.packed, there));
        if (block < blocks) store_in_row<T>(a, block, (threadIdx.x & 3) * 8, aligned, v);
    }
}

// The first `gapless` blocks allow decode_gapless.
template <class Codec, typename T, bool kFloatScale>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const DequantizeArgs a, int64_t blocks, int64_t gapless, bool aligned) {
    using Levels = LevelTable<Codec::kIndexBits>;
    __shared__ float shared_levels[Levels::kInLanes ? 1 : 1 << Codec::kIndexBits];
    __shared__ uint4 staged[kWarps][kWarpBlocks * Codec::kWords / 4];
    const Levels levels(a.packed.codebook, shared_levels);
    const int64_t cta = int64_t{blockIdx.x} * kWarps * kWarpBlocks, start = cta + threadIdx.x / 32 * kWarpBlocks;
    if (cta + kWarps * kWarpBlocks <= gapless) {
        decode_gapless<Codec, T, kFloatScale>(a, levels, staged[threadIdx.x / 32], start);
    } else {
        decode_by_row<Codec, T, kFloatScale>(a, levels, start, blocks, aligned);
    }
}

}  // namespace

void dequantize_cuda(const DequantizeArgs& a, int device, void* stream) {
    const int64_t blocks = a.packed.rows * blocks_per_row(a.packed.cols);
    if (blocks == 0) return;
    const DeviceGuard guard(device);
    const bool pointers = all_aligned16({a.packed.words, a.out});
    const bool aligned = pointers && a.packed.cols * dtype_size(a.dtype) % 16 == 0;
    const int64_t gapless = !pointers                     ? 0
                            : a.packed.cols % kBlock == 0 ? blocks
                            : a.packed.rows == 1          ? a.packed.cols / kBlock
                                                          : 0;
    const auto grid = static_cast<unsigned>(divide_up(blocks, kWarps * kWarpBlocks));
    const auto on = static_cast<cudaStream_t>(stream);
    with_codec(a.packed, [&](auto codec) {
        with_dtype(a.dtype, [&](auto element) {
            using C = decltype(codec);
            using T = typename decltype(element)::Type;
            auto kernel = dequantize_kernel<C, T, false>;
            if constexpr (C::kFloatScales) {
                if (a.packed.float_scales) kernel = dequantize_kernel<C, T, true>;
            }
            kernel<<<grid, kThreads, 0, on>>>(a, blocks, gapless, aligned);
        });
    });
    check_cuda(cudaGetLastError(), "dequantize",
               matrix_shape(a.packed.rows, a.packed.cols) + " at K=" + std::to_string(a.packed.k));
}

}  // namespace kbitq
