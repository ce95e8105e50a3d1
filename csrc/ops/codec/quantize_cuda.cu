// quantize on the GPU. A lane owns a block: its 32 values stay in registers, every candidate scale is a walk over them,
// and the error tree, the maximum and the planes need no other lane. A warp takes a strip of 32 neighbouring blocks: it
// copies them (coalesced, asynchronously, one strip ahead) to shared memory, where each lane picks up its own, and
// hands the words back the same way.
#include <cuda_pipeline_primitives.h>

#include "codecs/planes.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "ops/codec/quantize_search.cuh"
#include "ops/codec/quantize_source.cuh"
#include "ops/codec/quantize_trellis.h"

namespace kbitq {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kMseCtas = 4, kAbsmaxCtas = 7;  // resident on a multiprocessor: what the registers allow
constexpr int kStripBlocks = 32;
constexpr int kBuffers = 2;

constexpr int strip_bytes(DType dtype) { return kStripBlocks * kBlock * dtype_size(dtype); }

// What the kernel needs besides the arguments.
struct Work {
    int64_t blocks;
    bool whole;        // rows are whole blocks, and w, packed and importance are 16-byte aligned
    int buffer_bytes;  // of one strip in shared memory
};

// Where 16-byte chunk c of a strip lies in its buffer, so that neither lanes with neighbouring chunks nor lanes with
// neighbouring blocks meet in a bank.
__device__ __forceinline__ int swizzled(int c) { return c ^ ((c >> 3) & 7); }

__device__ __forceinline__ void fetch_strip(uint4* buffer, const QuantizeArgs& a, int64_t strip) {
    const int lane = threadIdx.x & 31, size = a.dtype == DType::f32 ? 4 : 2;
    const uint4* source = static_cast<const uint4*>(a.w) + strip * (kStripBlocks * kBlock / 16 * size);
#pragma unroll
    for (int q = 0; q < 4; ++q) __pipeline_memcpy_async(buffer + swizzled(lane + 32 * q), source + lane + 32 * q, 16);
    if (a.dtype != DType::f32) return;
#pragma unroll
    for (int q = 4; q < 8; ++q) __pipeline_memcpy_async(buffer + swizzled(lane + 32 * q), source + lane + 32 * q, 16);
}

template <typename T>
__device__ __forceinline__ void read_chunks(float (&v)[kBlock], const uint4* buffer) {
    constexpr int kElements = 16 / sizeof(T), kChunks = kBlock / kElements;
#pragma unroll
    for (int r = 0; r < kChunks; ++r)
        widen_chunk<T>(buffer[swizzled(kChunks * (threadIdx.x & 31) + r)], v + kElements * r);
}

__device__ __forceinline__ void read_block(float (&v)[kBlock], const uint4* buffer, DType dtype) {
    if (dtype == DType::bf16) return read_chunks<__nv_bfloat16>(v, buffer);
    if (dtype == DType::f16) return read_chunks<__half>(v, buffer);
    read_chunks<float>(v, buffer);
}

// The `mse` rule: the candidate of least error, the smallest byte on a tie (candidates ascend, so a strict < keeps it).
template <int K, typename ErrorOf>
__device__ __forceinline__ uint32_t least_error_byte(int base, int top, const ErrorOf& error_of) {
    int best = 0;
    float least = INFINITY;
#pragma unroll 1
    for (int d = first_candidate(K); d <= kLastCandidate; d += candidate_step(K)) {
        const int byte = max(0, min(base + d, top));
        const float error = error_of(decode_e4m4(byte));
        best = error < least ? byte : best;
        least = error < least ? error : least;
    }
    return best;
}

template <int K, bool kMse, bool kWeighted>
__device__ __forceinline__ uint32_t choose_byte(const SearchTables<K>& t, const float (&v)[kBlock],
                                                const float (&weight)[kBlock], float most) {
    const int base = static_cast<int>(encode_e4m4(most));
    if constexpr (!kMse) return min(base, t.top);
    if constexpr (K <= 3 && !kWeighted) {
        if (t.symmetric) {
            const Magnitudes<K> magnitudes(v);
            return least_error_byte<K>(base, t.top, [&](float s) { return magnitudes.error_of(t, s); });
        }
    }
    if constexpr (SearchTables<K>::kInRegisters) {
        return least_error_byte<K>(base, t.top,
                                   [&](float s) { return error_of<kWeighted>(RegisterSearch(t, s), v, weight); });
    } else if (t.cells) {
        return least_error_byte<K>(base, t.top,
                                   [&](float s) { return error_of<kWeighted>(CellSearch<K>(t, s), v, weight); });
    }
    return least_error_byte<K>(base, t.top,
                               [&](float s) { return error_of<kWeighted>(BisectSearch<K>(t, s), v, weight); });
}

// Element i's index into its group's registers; i is a template parameter because shifts are parts of instructions.
template <int K, int i, typename Search>
__device__ __forceinline__ void find_indices(EightIndices<K> (&group)[4], const Search& search,
                                             const float (&v)[kBlock]) {
    if constexpr (i < kBlock) {
        uint32_t& sum = K <= 4 || i % 8 < 4 ? group[i / 8].low : group[i / 8].high;
        search.template add_index<EightIndices<K>::shift(i % 8)>(sum, v[i]);
        find_indices<K, i + 1>(group, search, v);
    }
}

template <int K, typename Search>
__device__ __forceinline__ void find_planes(uint32_t (&plane)[K], const Search& search, const float (&v)[kBlock]) {
    EightIndices<K> group[4] = {};
    find_indices<K, 0>(group, search, v);
    planes_of_indices<K>(group, plane);
}

template <int K>
__device__ __forceinline__ void block_planes(uint32_t (&plane)[K], const SearchTables<K>& t, const float (&v)[kBlock],
                                             float s, int length) {
    if constexpr (SearchTables<K>::kInRegisters) {
        find_planes<K>(plane, RegisterSearch(t, s), v);
    } else if (t.cells && CellSearch<K>::serves(s)) {
        find_planes<K>(plane, CellSearch<K>(t, s), v);
    } else {
        find_planes<K>(plane, BisectSearch<K>(t, s), v);
    }
    // Elements past the end, and all of a block of scale 0, have the index of zero.
    const uint32_t live = s == 0.0f ? 0u : length < kBlock ? (1u << length) - 1u : ~0u;
#pragma unroll
    for (int j = 0; j < K; ++j) plane[j] = (plane[j] & live) | ((t.zero >> j) & 1 ? ~live : 0u);
}

// A full strip's words, staged in the strip's buffer and written 16 bytes a lane.
template <int K>
__device__ __forceinline__ void store_strip(uint32_t* packed, int64_t strip, const uint32_t (&plane)[K],
                                            uint4* buffer) {
    const int lane = threadIdx.x & 31;
    uint32_t* words = reinterpret_cast<uint32_t*>(buffer);
    __syncwarp();  // every lane has read its block
#pragma unroll
    for (int j = 0; j < K; ++j) words[lane * K + j] = plane[j];
    __syncwarp();
    uint4* target = reinterpret_cast<uint4*>(packed + strip * kStripBlocks * K);
#pragma unroll
    for (int c = 0; c < 8 * K; c += 32) {
        if (c + lane < 8 * K) target[c + lane] = buffer[c + lane];
    }
    __syncwarp();  // the buffer may be filled again
}

template <int K, bool kMse, bool kWeighted>
__global__ void __launch_bounds__(kThreads, kMse ? kMseCtas : kAbsmaxCtas)
    quantize_kernel(const QuantizeArgs a, const Work work) {
    __shared__ SearchTables<K> t;
    extern __shared__ uint4 buffers[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int chunks = work.buffer_bytes / 16;
    uint4* mine = buffers + warp * kBuffers * chunks;
    const int64_t full_strips = work.whole ? work.blocks / kStripBlocks : 0, stride = int64_t{gridDim.x} * kWarps;
    int64_t strip = int64_t{blockIdx.x} * kWarps + warp;
    if (strip < full_strips) fetch_strip(mine, a, strip);
    __pipeline_commit();
    build_tables(t, a);
    for (int turn = 0; strip * kStripBlocks < work.blocks; strip += stride, turn ^= 1) {
        uint4* buffer = mine + turn * chunks;
        const int64_t block = strip * kStripBlocks + lane;
        const bool full = strip < full_strips;
        if (strip + stride < full_strips) fetch_strip(mine + (turn ^ 1) * chunks, a, strip + stride);
        __pipeline_commit();
        float v[kBlock], weight[kBlock], most = 0.0f;
        Place at{0, 0, kBlock};
        if (!full || kWeighted) at = place_of(a, block, work.blocks);
        if (full) {
            __pipeline_wait_prior(1);
            __syncwarp();
            read_block(v, buffer, a.dtype);
        } else {
            const int64_t first = at.row * a.packed.cols + at.column;
            load_tail(v, at.length, [&](int i) { return load_element(a.w, a.dtype, first + i); });
        }
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            v[i] *= t.to_blocks;
            most = fmaxf(most, fabsf(v[i]));
        }
        if constexpr (kWeighted) load_weights(weight, a, at, work.whole);
        float s = most;
        if (a.packed.float_scales) {
            if (at.length > 0) a.packed.float_scales[block] = most;
        } else {
            const uint32_t byte = most == 0.0f ? 0 : choose_byte<K, kMse, kWeighted>(t, v, weight, most);
            if (at.length > 0) a.packed.scales[block] = static_cast<uint8_t>(byte);
            s = decode_e4m4(byte);
        }
        uint32_t plane[K];
        block_planes<K>(plane, t, v, s, at.length);
        if (full) {
            store_strip<K>(a.packed.words, strip, plane, buffer);
        } else if (at.length > 0) {
#pragma unroll
            for (int j = 0; j < K; ++j) a.packed.words[block * K + j] = plane[j];
        }
    }
}

// A CTA first builds its tables, so it should take several strips a warp; but first all multiprocessors should be full,
// and there should be some rounds of CTAs, for they do not end together.
unsigned grid_of(int64_t ctas, int device, bool mse) {
    const int64_t strips_a_warp = mse ? 2 : 4, rounds = mse ? 8 : 4;
    const int64_t resident = int64_t{multiprocessors(device)} * (mse ? kMseCtas : kAbsmaxCtas);
    const int64_t wanted = std::max(resident, std::min(divide_up(ctas, strips_a_warp), rounds * resident));
    return static_cast<unsigned>(std::max<int64_t>(1, std::min(ctas, wanted)));
}

}  // namespace

void quantize_cuda(const QuantizeArgs& a, int device, void* stream) {
    if (a.packed.codec == Codec::trellis) return quantize_trellis_cuda(a, device, stream);
    const DeviceGuard guard(device);
    Work work{};
    work.blocks = a.packed.rows * blocks_per_row(a.packed.cols);
    work.whole = a.packed.cols % kBlock == 0 && all_aligned16({a.w, a.packed.words, a.importance});
    work.buffer_bytes = strip_bytes(a.dtype);
    const bool mse = a.rule == ScaleRule::mse, weighted = mse && (a.importance || a.packed.cols % kBlock != 0);
    const int64_t ctas = divide_up(divide_up(work.blocks, kStripBlocks), kWarps);
    const unsigned grid = grid_of(ctas, device, mse);
    const int shared = kWarps * kBuffers * work.buffer_bytes;
    with_bits(a.packed.k, [&](auto bits) {
        const auto kernel = weighted ? quantize_kernel<bits, true, true>
                            : mse    ? quantize_kernel<bits, true, false>
                                     : quantize_kernel<bits, false, false>;
        kernel<<<grid, kThreads, shared, static_cast<cudaStream_t>(stream)>>>(a, work);
    });
    check_cuda(cudaGetLastError(), "quantize",
               matrix_shape(a.packed.rows, a.packed.cols) + " at K=" + std::to_string(a.packed.k));
}

}  // namespace kbitq
