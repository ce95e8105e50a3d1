// stats on the GPU. A thread decodes a block, compares it with its source and adds its 32 terms in the tree; then the
// blocks of a row are added left to right, which only one thread can do. A CTA takes as many rows as give each of its
// threads a block, or one long row in pieces; what is sequential costs one float64 addition a block.
#include "codecs/planes.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/tree.cuh"
#include "ops/codec/stats.h"

namespace kbitq {
namespace {

constexpr int kThreads = 128;
constexpr int kCtasPerSm = 32;

// What the blocks of a piece contribute, block by block.
struct Piece {
    double signal[kThreads], noise[kThreads], worst[kThreads];
};

template <DType D>
__device__ __forceinline__ void load_source(float (&w)[kBlock], const StatsArgs& a, int64_t first, int length,
                                            bool whole) {
    if (!whole) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) w[i] = i < length ? load_element<D>(a.w, first + i) : 0.0f;
    } else if constexpr (D == DType::f32) {
        const auto* source = reinterpret_cast<const float4*>(static_cast<const float*>(a.w) + first);
#pragma unroll
        for (int i = 0; i < kBlock / 4; ++i) {
            const float4 four = source[i];
            w[4 * i] = four.x, w[4 * i + 1] = four.y, w[4 * i + 2] = four.z, w[4 * i + 3] = four.w;
        }
    } else {
        const auto* source = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.w) + first);
#pragma unroll
        for (int i = 0; i < kBlock / 8; ++i) {
            const uint4 chunk = source[i];
            const uint32_t word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 pair = widen_pair<D>(word[j]);
                w[8 * i + 2 * j] = pair.x, w[8 * i + 2 * j + 1] = pair.y;
            }
        }
    }
}

template <int K>
__device__ __forceinline__ void decode(float (&decoded)[kBlock], const StatsArgs& a, const float* levels, int64_t block,
                                       int length) {
    uint32_t plane[K];
#pragma unroll
    for (int j = 0; j < K; ++j) plane[j] = a.packed.words[block * K + j];
    const float s = a.packed.float_scales ? a.packed.float_scales[block] : decode_scale(a.packed.scales[block]);
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        const EightIndices<K> index = indices_of_planes<K>(plane, byte_of_two(g));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = levels[index.at(i) & ((1 << K) - 1)] * s;
            decoded[8 * g + i] = 8 * g + i < length ? value : 0.0f;  // like the source past the end
        }
    }
}

template <int K, DType D>
__device__ __forceinline__ void measure_block(Piece& piece, const StatsArgs& a, const float* levels, int64_t row,
                                              int64_t b, bool whole) {
    const int length = static_cast<int>(min(a.packed.cols - b * kBlock, int64_t{kBlock}));
    float w[kBlock], decoded[kBlock];
    load_source<D>(w, a, row * a.packed.cols + b * kBlock, length, whole);
    decode<K>(decoded, a, levels, row * blocks_per_row(a.packed.cols) + b, length);
    double worst = 0.0;
    piece.signal[threadIdx.x] = tree_sum([&](int i) {
        const double x = w[i];
        return x * x;
    });
    piece.noise[threadIdx.x] = tree_sum([&](int i) {
        const double e = static_cast<double>(w[i]) - static_cast<double>(decoded[i]);
        worst = fmax(worst, fabs(e));
        return e * e;
    });
    piece.worst[threadIdx.x] = worst;
}

// The blocks [begin, end) of a piece added to a row's sums; left to right, whatever came before. The three columns by
// different threads.
__device__ __forceinline__ void add_blocks(double* out, const Piece& piece, int column, int begin, int end) {
    double sum = *out;
    if (column == 2) {
        for (int i = begin; i < end; ++i) sum = fmax(sum, piece.worst[i]);
    } else {
        const double* terms = column == 0 ? piece.signal : piece.noise;
        for (int i = begin; i < end; ++i) sum += terms[i];
    }
    *out = sum;
}

// rows_at_once > 1: rows of nblk blocks each, in one piece; else one row in pieces of kThreads blocks.
template <int K, DType D>
__global__ void __launch_bounds__(kThreads) stats_kernel(const StatsArgs a, int rows_at_once, bool whole) {
    __shared__ Piece piece;
    __shared__ float levels[1 << K];
    for (int i = threadIdx.x; i < (1 << K); i += kThreads) levels[i] = a.packed.codebook[i];
    const int64_t nblk = blocks_per_row(a.packed.cols);
    const int span = static_cast<int>(max(int64_t{1}, min(nblk, int64_t{kThreads})));  // blocks of a row in a piece
    const int row_in_piece = threadIdx.x / span;
    for (int64_t first = int64_t{blockIdx.x} * rows_at_once; first < a.packed.rows;
         first += int64_t{gridDim.x} * rows_at_once) {
        const int rows = static_cast<int>(min(int64_t{rows_at_once}, a.packed.rows - first));
        for (int i = threadIdx.x; i < rows * kStatsColumns; i += kThreads) a.out[first * kStatsColumns + i] = 0.0;
        for (int64_t begin = 0; begin < nblk; begin += span) {
            const int count = static_cast<int>(min(int64_t{span}, nblk - begin)),
                      mine = threadIdx.x - row_in_piece * span;
            __syncthreads();  // the levels are there; the piece before has been added
            if (row_in_piece < rows && mine < count) {
                measure_block<K, D>(piece, a, levels, first + row_in_piece, begin + mine, whole);
            }
            __syncthreads();
            // Sums by the first threads, maxima by the last, so that with few rows they are not of one warp.
            for (int i = threadIdx.x; i < 2 * rows; i += kThreads) {
                const int row = i / 2, column = i % 2;
                add_blocks(a.out + (first + row) * kStatsColumns + column, piece, column, row * span,
                           row * span + count);
            }
            for (int row = kThreads - 1 - threadIdx.x; row < rows; row += kThreads) {
                add_blocks(a.out + (first + row) * kStatsColumns + 2, piece, 2, row * span, row * span + count);
            }
        }
    }
}

}  // namespace

void stats_cuda(const StatsArgs& a, int device, void* stream) {
    if (a.packed.rows == 0) return;
    const DeviceGuard guard(device);
    const int64_t nblk = blocks_per_row(a.packed.cols);
    const int rows_at_once = static_cast<int>(std::max<int64_t>(1, kThreads / std::max<int64_t>(nblk, 1)));
    const bool whole = a.packed.cols % kBlock == 0 && all_aligned16({a.w});
    const unsigned grid = grid_for(divide_up(a.packed.rows, rows_at_once), device, kCtasPerSm);
    with_bits(a.packed.k, [&](auto bits) {
        with_dtype(a.dtype, [&](auto dtype) {
            stats_kernel<bits, dtype><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, rows_at_once, whole);
        });
    });
    check_cuda(cudaGetLastError(), "stats",
               matrix_shape(a.packed.rows, a.packed.cols) + " at K=" + std::to_string(a.packed.k));
}

}  // namespace kbitq
