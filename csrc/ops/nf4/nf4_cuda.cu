// NF4 on CUDA. Quantizing and dequantizing give the CPU's bytes: one rounding after each operation, none of which can
// be fused with another. The table of levels has 16 entries of 32 bits, so lanes that read different ones never meet in
// a bank of shared memory.
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "format/nf4.h"
#include "ops/nf4/nf4.h"

namespace kbitq {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

__constant__ float kLevels[kNf4Levels] = {kNf4Level[0],  kNf4Level[1],  kNf4Level[2],  kNf4Level[3],
                                          kNf4Level[4],  kNf4Level[5],  kNf4Level[6],  kNf4Level[7],
                                          kNf4Level[8],  kNf4Level[9],  kNf4Level[10], kNf4Level[11],
                                          kNf4Level[12], kNf4Level[13], kNf4Level[14], kNf4Level[15]};

int log2_of(int power) {
    int n = 0;
    while ((1 << n) < power) ++n;
    return n;
}

__device__ __forceinline__ void fill_levels(float* level) {
    if (threadIdx.x < kNf4Levels) level[threadIdx.x] = kLevels[threadIdx.x];
    __syncthreads();
}

// The level of byte `index` of a word, high or low half. The table is read by its byte offset.
template <int index, bool high>
__device__ __forceinline__ float level_of(const float* level, uint32_t word) {
    constexpr int shift = 8 * index + (high ? 4 : 0) - 2;
    const uint32_t offset = (shift >= 0 ? word >> (shift >= 0 ? shift : 0) : word << (shift < 0 ? -shift : 0)) & 0x3Cu;
    return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(level) + offset);
}

__device__ __forceinline__ void levels_of(float (&v)[8], const float* level, uint32_t word) {
    v[0] = level_of<0, true>(level, word), v[1] = level_of<0, false>(level, word);
    v[2] = level_of<1, true>(level, word), v[3] = level_of<1, false>(level, word);
    v[4] = level_of<2, true>(level, word), v[5] = level_of<2, false>(level, word);
    v[6] = level_of<3, true>(level, word), v[7] = level_of<3, false>(level, word);
}

// --- quantize: a warp a block ----------------------------------------------------------------------

template <typename T>
__global__ __launch_bounds__(kThreads) void quantize_kernel(const Nf4QuantizeArgs a, int64_t blocks) {
    __shared__ float bound[kNf4Levels];
    if (threadIdx.x + 1 < kNf4Levels) bound[threadIdx.x] = (kLevels[threadIdx.x] + kLevels[threadIdx.x + 1]) / 2.0f;
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    for (int64_t b = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kWarp; b < blocks;
         b += gridDim.x * int64_t{kThreads} / kWarp) {
        const int64_t first = b * a.block;
        const int length = a.count - first < a.block ? static_cast<int>(a.count - first) : a.block;
        float most = 0.0f;
        for (int i = lane; i < length; i += kWarp) most = fmaxf(most, fabsf(load_element<T>(a.w, first + i)));
        for (int step = kWarp / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const float divisor = fmaxf(most, kNf4LeastScale), inverse = 1.0f / divisor;
        const bool whole = length == a.block;
        const auto code = [&](int i) {
            if (i >= length) return kNf4Zero;
            const float v = load_element<T>(a.w, first + i);
            return nf4_code(whole ? v * inverse : v / divisor, bound);
        };
        for (int i = 2 * lane; i < length; i += 2 * kWarp)
            a.codes[(first + i) / 2] = static_cast<uint8_t>(code(i) << 4 | code(i + 1));
        if (lane == 0) a.scales[b] = whole ? most : divisor;
    }
}

// --- dequantize: a thread eight values -------------------------------------------------------------

__device__ __forceinline__ uint32_t load_codes(const uint8_t* codes, int64_t bytes, int64_t group, bool aligned) {
    if (aligned && 4 * group + 4 <= bytes) return reinterpret_cast<const uint32_t*>(codes)[group];
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i)
        if (4 * group + i < bytes) word |= static_cast<uint32_t>(codes[4 * group + i]) << (8 * i);
    return word;
}

template <typename T>
__global__ __launch_bounds__(kThreads) void dequantize_kernel(const Nf4DequantizeArgs a, int log_block, bool aligned) {
    __shared__ float level[kNf4Levels];
    fill_levels(level);
    const int64_t groups = (a.count + 7) / 8, bytes = (a.count + 1) / 2;
    for (int64_t g = blockIdx.x * int64_t{kThreads} + threadIdx.x; g < groups; g += gridDim.x * int64_t{kThreads}) {
        const uint32_t word = load_codes(a.codes, bytes, g, aligned);
        const float scale = a.scales[(8 * g) >> log_block];
        float v[8];
        levels_of(v, level, word);
#pragma unroll
        for (float& value : v) value *= scale;
        store_eight_in_row(static_cast<T*>(a.out) + 8 * g, v, a.count - 8 * g, aligned);
    }
}

// --- linear: a CTA a few rows, its warps share out the columns -------------------------------------

constexpr int kLinearWarps = 4;
constexpr int kLaneWeights = 32;  // of a row that a lane reads at once: 16 bytes, within one block

// Eight neighbours of x as float32.
template <typename T>
__device__ __forceinline__ void load_x(float (&v)[8], const T* x) {
    constexpr int kPerChunk = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < 8 / kPerChunk; ++i) widen_chunk<T>(reinterpret_cast<const uint4*>(x)[i], v + i * kPerChunk);
}

// part[r][m] of a lane's 32 columns from column `col` on.
template <typename T, int kRows, int kBatch>
__device__ __forceinline__ void add_products(float (&part)[kRows][kBatch], const uint4 (&codes)[kRows], const T* x,
                                             int64_t cols, const float* level) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float xs[kBatch][8];
#pragma unroll
        for (int m = 0; m < kBatch; ++m) load_x(xs[m], x + m * cols + 8 * w);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const uint32_t words[4] = {codes[r].x, codes[r].y, codes[r].z, codes[r].w};
            float v[8];
            levels_of(v, level, words[w]);
#pragma unroll
            for (int m = 0; m < kBatch; ++m)
#pragma unroll
                for (int i = 0; i < 8; ++i) part[r][m] = fmaf(v[i], xs[m][i], part[r][m]);
        }
    }
}

// The sums of all lanes and warps, in a fixed order, to y.
template <typename T, int kRows, int kBatch>
__device__ __forceinline__ void finish(const Nf4LinearArgs& a, float (&sum)[kRows][kBatch], int64_t row,
                                       int64_t batch) {
    __shared__ float of_warp[kLinearWarps][kRows * kBatch];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int m = 0; m < kBatch; ++m) {
            float s = sum[r][m];
#pragma unroll
            for (int step = kWarp / 2; step > 0; step /= 2) s += __shfl_xor_sync(~0u, s, step);
            if (lane == 0) of_warp[warp][r * kBatch + m] = s;
        }
    __syncthreads();
    const int r = threadIdx.x / kBatch, m = threadIdx.x % kBatch;
    if (r >= kRows || row + r >= a.rows) return;
    float y = 0.0f;
    for (int w = 0; w < kLinearWarps; ++w) y += of_warp[w][threadIdx.x];
    if (a.bias) y += Element<T>::widen(static_cast<const T*>(a.bias)[row + r]);
    static_cast<T*>(a.y)[(batch + m) * a.rows + row + r] = Element<T>::round(y);
}

template <typename T, int kRows, int kBatch>
__global__ __launch_bounds__(kLinearWarps* kWarp) void linear_kernel(const Nf4LinearArgs a, int log_block,
                                                                     int64_t batch) {
    __shared__ float level[kNf4Levels];
    fill_levels(level);
    const int64_t row = blockIdx.x * int64_t{kRows}, chunks = a.cols / kLaneWeights;
    const T* x = static_cast<const T*>(a.x) + batch * a.cols;
    float sum[kRows][kBatch] = {};
    for (int64_t c = threadIdx.x; c < chunks; c += kLinearWarps * kWarp) {
        uint4 codes[kRows];
        float scale[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int64_t first = (row + r < a.rows ? row + r : a.rows - 1) * a.cols + c * kLaneWeights;
            codes[r] = __ldcs(reinterpret_cast<const uint4*>(a.codes + first / 2));
            scale[r] = a.scales[first >> log_block];
        }
        float part[kRows][kBatch] = {};
        add_products(part, codes, x + c * kLaneWeights, a.cols, level);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int m = 0; m < kBatch; ++m) sum[r][m] = fmaf(part[r][m], scale[r], sum[r][m]);
    }
    finish<T>(a, sum, row, batch);
}

template <typename T, int kRows, int kBatch>
void launch_linear(const Nf4LinearArgs& a, int64_t batch, cudaStream_t stream) {
    const auto grid = static_cast<unsigned>(divide_up(a.rows, kRows));
    linear_kernel<T, kRows, kBatch><<<grid, kLinearWarps * kWarp, 0, stream>>>(a, log2_of(a.block), batch);
}

}  // namespace

void nf4_quantize_cuda(const Nf4QuantizeArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    const int64_t blocks = divide_up(args.count, args.block);
    if (blocks == 0) return;
    with_dtype(args.dtype, [&](auto element) {
        using T = typename decltype(element)::Type;
        quantize_kernel<T><<<grid_for(divide_up(blocks, kThreads / kWarp), device, 16), kThreads, 0,
                             static_cast<cudaStream_t>(stream)>>>(args, blocks);
    });
    check_cuda(cudaGetLastError(), "nf4_quantize", std::to_string(args.count));
}

void nf4_dequantize_cuda(const Nf4DequantizeArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    if (args.count == 0) return;
    const bool aligned = all_aligned16({args.codes, args.out});
    with_dtype(args.dtype, [&](auto element) {
        using T = typename decltype(element)::Type;
        dequantize_kernel<T><<<grid_for(divide_up(divide_up(args.count, 8), kThreads), device, 32), kThreads, 0,
                               static_cast<cudaStream_t>(stream)>>>(args, log2_of(args.block), aligned);
    });
    check_cuda(cudaGetLastError(), "nf4_dequantize", std::to_string(args.count));
}

void nf4_linear_cuda(const Nf4LinearArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    if (args.rows == 0 || args.batch == 0) return;
    if (!all_aligned16({args.x, args.codes})) throw std::runtime_error("nf4_linear: x and codes must be aligned to 16");
    const auto on = static_cast<cudaStream_t>(stream);
    with_dtype(args.dtype, [&](auto element) {
        using T = typename decltype(element)::Type;
        int64_t m = 0;
        for (; m + 4 <= args.batch; m += 4) launch_linear<T, 4, 4>(args, m, on);
        for (; m + 2 <= args.batch; m += 2) launch_linear<T, 4, 2>(args, m, on);
        for (; m < args.batch; ++m) launch_linear<T, 4, 1>(args, m, on);
    });
    check_cuda(cudaGetLastError(), "nf4_linear", matrix_shape(args.rows, args.cols));
}

}  // namespace kbitq
