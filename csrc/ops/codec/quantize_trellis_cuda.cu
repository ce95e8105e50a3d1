// quantize of the codec `trellis` on the GPU: a thread takes a block, a warp 32 of them, with their scales
// (codecs/trellis_encode.cuh). All threads do the same for every candidate, so a warp never splits. The multiprocessor
// is filled by a single CTA, with as many warps as its shared memory has room for; they deal its strips out among them.
#include "codecs/trellis_encode.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "format/scale_e4m4.h"
#include "ops/codec/quantize_source.cuh"
#include "ops/codec/quantize_trellis.h"

namespace kbitq {
namespace {

constexpr int kMostWarps = 7;
constexpr int kWarpBytes = kWarpSlots * 16;
constexpr int kStripBlocks = 32;  // of a warp at a time, some of which may not exist

// What a CTA shares besides the slots.
struct Shared {
    float levels[trellis_levels(kTrellisMaxBits)];
    float to_blocks;  // 2^-x
    int top;          // the largest byte that may be chosen
    int next;         // strip of this CTA that no warp has taken
};

struct Work {
    int64_t strips;
    bool whole;  // rows are whole blocks, and w and importance are 16-byte aligned
};

__device__ __forceinline__ void fill_shared(Shared& shared, const QuantizeArgs& a, int levels) {
    const int x = a.amax ? tensor_exponent(*a.amax) : 0;
    for (int i = threadIdx.x; i < levels; i += blockDim.x) {
        shared.levels[i] = a.levels[i];
        if (blockIdx.x == 0 && a.packed.codebook) a.packed.codebook[i] = a.levels[i] * exp2_int(x);
    }
    if (threadIdx.x == 0) {
        shared.to_blocks = exp2_int(-x);
        shared.top = a.amax ? static_cast<int>(top_byte(x, a.dtype)) : kScaleBytes - 1;
        shared.next = 0;
    }
    __syncthreads();
}

// A block of one scale, as a thread sees it.
struct Mine {
    int64_t block, scale;  // their numbers in the matrix
    Place at;
    bool first;  // of the blocks of its scale
};

template <int ScaleBlocks>
__device__ __forceinline__ Mine mine_of(const QuantizeArgs& a, int64_t strip) {
    const int64_t number = strip * kStripBlocks + (threadIdx.x & 31), nblk = blocks_per_row(a.packed.cols);
    if constexpr (ScaleBlocks == 1) {
        return {number, number, place_of(a, number, a.packed.rows * nblk), true};
    } else {
        const int64_t scale = number / ScaleBlocks, per_row = scales_per_row(a.packed.cols, ScaleBlocks);
        const int64_t row = block_row(scale, per_row);
        const int within = static_cast<int>(number % ScaleBlocks);
        const int64_t b = (scale - row * per_row) * ScaleBlocks + within;
        const bool there = row < a.packed.rows && b < nblk;
        const int64_t block = row * nblk + b;
        return {block, scale, there ? place_of(a, block, block + 1) : Place{}, within == 0};
    }
}

template <typename T>
__device__ __forceinline__ void load_whole(float (&v)[kBlock], const T* source) {
    constexpr int kElements = 16 / sizeof(T);
    const auto* chunks = reinterpret_cast<const uint4*>(source);
#pragma unroll
    for (int i = 0; i < kBlock / kElements; ++i) widen_chunk<T>(chunks[i], v + kElements * i);
}

// Puts the elements of a block, and their weights, into the slots; returns the largest magnitude. Done anew for each
// candidate, from the caches: registers are what is short.
template <bool kWeighted>
__device__ __forceinline__ float stage_block(TrellisSlots& slots, const QuantizeArgs& a, const Work& work,
                                             const Place& at, float to_blocks) {
    float v[kBlock], weight[kBlock], most = 0.0f;
    const int64_t first = at.row * a.packed.cols + at.column;
    if (!work.whole || at.length < kBlock) {
        load_tail(v, at.length, [&](int i) { return load_element(a.w, a.dtype, first + i); });
    } else if (a.dtype == DType::bf16) {
        load_whole(v, static_cast<const __nv_bfloat16*>(a.w) + first);
    } else if (a.dtype == DType::f16) {
        load_whole(v, static_cast<const __half*>(a.w) + first);
    } else {
        load_whole(v, static_cast<const float*>(a.w) + first);
    }
    if constexpr (kWeighted) load_weights(weight, a, at, work.whole && at.length == kBlock);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
        v[i] *= to_blocks;
        most = fmaxf(most, fabsf(v[i]));
        slots.put_element(i, v[i], kWeighted ? weight[i] : 1.0f);
    }
    return most;
}

// The largest of the blocks of a scale; the sum of their errors, in their order.
template <int ScaleBlocks>
__device__ __forceinline__ float most_of_scale(float most) {
#pragma unroll
    for (int by = 1; by < ScaleBlocks; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
    return most;
}

template <int ScaleBlocks>
__device__ __forceinline__ float error_of_scale(float error) {
    if constexpr (ScaleBlocks == 1) return error;
    float sum = 0.0f;
#pragma unroll
    for (int b = 0; b < ScaleBlocks; ++b) sum += __shfl_sync(~0u, error, b, ScaleBlocks);
    return sum;
}

// The turns of a strip: the candidates, ascending, so that a strict < keeps the smallest byte on a tie; then the best
// of them again for its path, and its elements again for the words. One loop, so that each part's code is there once.
template <int K, int ScaleBlocks, bool kWeighted>
__device__ __forceinline__ void encode_strip(const QuantizeArgs& a, const Work& work, const Shared& shared,
                                             TrellisSlots& slots, int64_t strip) {
    const bool mse = a.rule == ScaleRule::mse, given = a.rule == ScaleRule::given;
    const int candidates = mse ? kTrellisCandidates : 1;
    const Mine mine = mine_of<ScaleBlocks>(a, strip);
    int base = 0, byte = 0, start = 0;
    float least = INFINITY;
    uint32_t path = 0, words[K];
#pragma unroll 1
    for (int turn = 0; turn <= candidates + 1; ++turn) {
        const float most = stage_block<kWeighted>(slots, a, work, mine.at, shared.to_blocks);
        if (turn == 0) base = static_cast<int>(encode_e4m4(most_of_scale<ScaleBlocks>(most)));
        const int candidate = base + (mse ? trellis_candidate(K, ScaleBlocks, turn) : 0);
        int trial = turn >= candidates ? byte : max(0, min(candidate, shared.top));
        if (given && turn < candidates) trial = mine.at.length > 0 ? a.packed.scales[mine.scale] : 0;
        const float s = decode_e4m4(trial);
        if (turn > candidates) {
            words_of_path<K, kWeighted>(words, path, slots, shared.levels, s);
            break;
        }
        measure_classes<K, kWeighted>(slots, shared.levels, s);
        if (turn == candidates) {
            path = best_path(slots, start);
            continue;
        }
        const Walk walk = best_walk(slots, mse);
        const float error = error_of_scale<ScaleBlocks>(mine.at.length > 0 ? walk.error : 0.0f);
        if (error < least) {
            least = error;
            byte = trial;
            start = walk.start;
        }
    }
    if (mine.at.length == 0) return;
    if (mine.first) a.packed.scales[mine.scale] = static_cast<uint8_t>(byte);
#pragma unroll
    for (int j = 0; j < K; ++j) a.packed.words[mine.block * K + j] = byte == 0 ? zero_block_word(K, j) : words[j];
}

template <int K, int ScaleBlocks, bool kWeighted>
__global__ void __launch_bounds__(32 * kMostWarps, 1) quantize_trellis_kernel(const QuantizeArgs a, const Work work) {
    extern __shared__ float4 slots_of_cta[];
    __shared__ Shared shared;
    fill_shared(shared, a, trellis_levels(K));
    TrellisSlots slots(slots_of_cta + threadIdx.x / 32 * kWarpSlots);
    const int64_t begin = work.strips * blockIdx.x / gridDim.x, end = work.strips * (blockIdx.x + 1) / gridDim.x;
    for (;;) {
        int taken = 0;
        if ((threadIdx.x & 31) == 0) taken = atomicAdd(&shared.next, 1);
        const int64_t strip = begin + __shfl_sync(~0u, taken, 0);
        if (strip >= end) return;
        encode_strip<K, ScaleBlocks, kWeighted>(a, work, shared, slots, strip);
    }
}

template <int K, int ScaleBlocks>
auto kernel_of(bool weighted) {
    return weighted ? quantize_trellis_kernel<K, ScaleBlocks, true> : quantize_trellis_kernel<K, ScaleBlocks, false>;
}

// Warps of a CTA, by the shared memory that it can have.
int warps_of(int device) {
    int bytes = 0;
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "device", "query");
    const int most = (bytes - static_cast<int>(sizeof(Shared))) / kWarpBytes;
    return std::max(1, std::min(most, kMostWarps));
}

}  // namespace

void quantize_trellis_cuda(const QuantizeArgs& a, int device, void* stream) {
    const DeviceGuard guard(device);
    const int64_t scales = a.packed.rows * scales_per_row(a.packed);
    const Work work{divide_up(scales * a.packed.scale_blocks, kStripBlocks),
                    a.packed.cols % kBlock == 0 && all_aligned16({a.w, a.importance})};
    const bool weighted = a.importance || a.packed.cols % kBlock != 0;
    const int warps = warps_of(device), shared = warps * kWarpBytes;
    const unsigned grid = grid_for(work.strips, device, 1);
    const std::string what = matrix_shape(a.packed.rows, a.packed.cols) + " at K=" + std::to_string(a.packed.k);
    with_trellis_bits(a.packed.k, [&](auto k) {
        const auto kernel =
            a.packed.scale_blocks == 1 ? kernel_of<k, 1>(weighted) : kernel_of<k, kWideScaleBlocks>(weighted);
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "quantize", what);
        kernel<<<grid, 32 * warps, shared, static_cast<cudaStream_t>(stream)>>>(a, work);
    });
    check_cuda(cudaGetLastError(), "quantize", what);
}

}  // namespace kbitq
