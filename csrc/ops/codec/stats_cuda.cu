// stats on the GPU. A thread decodes a block, compares it with its source and adds its 32 terms in the tree; then the
// blocks of a row are added left to right, which only one thread can do. A CTA takes as many rows as give each of its
// threads a block, or one long row in pieces; what is sequential costs one float64 addition a block.
#include "codecs/block_scale.cuh"
#include "codecs/dispatch.cuh"
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

template <typename T>
__device__ __forceinline__ void load_source(float (&w)[kBlock], const StatsArgs& a, int64_t first, int length,
                                            bool whole) {
    if (!whole) return load_tail(w, length, [&](int i) { return load_element<T>(a.w, first + i); });
    constexpr int kElements = 16 / sizeof(T);
    const auto* source = reinterpret_cast<const uint4*>(static_cast<const T*>(a.w) + first);
#pragma unroll
    for (int i = 0; i < kBlock / kElements; ++i) widen_chunk<T>(source[i], w + kElements * i);
}

template <class Codec>
__device__ __forceinline__ void decode(float (&decoded)[kBlock], const StatsArgs& a, const float* levels, int64_t block,
                                       int length) {
    uint32_t w[Codec::kWords];
#pragma unroll
    for (int j = 0; j < Codec::kWords; ++j) w[j] = a.packed.words[block * Codec::kWords + j];
    const bool floats = Codec::kFloatScales && a.packed.float_scales;
    const float s = floats ? load_scale<Codec, true>(a.packed, block) : load_scale<Codec, false>(a.packed, block);
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        const typename Codec::Indices index = Codec::indices(w, g);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = levels[index.at(i) & ((1 << Codec::kIndexBits) - 1)] * s;
            decoded[8 * g + i] = 8 * g + i < length ? value : 0.0f;  // like the source past the end
        }
    }
}

template <class Codec, typename T>
__device__ __forceinline__ void measure_block(Piece& piece, const StatsArgs& a, const float* levels, int64_t row,
                                              int64_t b, bool whole) {
    const int length = static_cast<int>(min(a.packed.cols - b * kBlock, int64_t{kBlock}));
    float w[kBlock], decoded[kBlock];
    load_source<T>(w, a, row * a.packed.cols + b * kBlock, length, whole);
    decode<Codec>(decoded, a, levels, row * blocks_per_row(a.packed.cols) + b, length);
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
template <class Codec, typename T>
__global__ void __launch_bounds__(kThreads) stats_kernel(const StatsArgs a, int rows_at_once, bool whole) {
    __shared__ Piece piece;
    __shared__ float levels[1 << Codec::kIndexBits];
    for (int i = threadIdx.x; i < (1 << Codec::kIndexBits); i += kThreads) levels[i] = a.packed.codebook[i];
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
                measure_block<Codec, T>(piece, a, levels, first + row_in_piece, begin + mine, whole);
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
    with_codec(a.packed, [&](auto codec) {
        with_dtype(a.dtype, [&](auto element) {
            using T = typename decltype(element)::Type;
            stats_kernel<decltype(codec), T>
                <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, rows_at_once, whole);
        });
    });
    check_cuda(cudaGetLastError(), "stats",
               matrix_shape(a.packed.rows, a.packed.cols) + " at K=" + std::to_string(a.packed.k));
}

}  // namespace kbitq
