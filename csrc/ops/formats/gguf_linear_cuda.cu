// y = x W^T from GGUF blocks on CUDA: a warp for each row of W. Its lanes take the row's groups of sixteen in turn,
// each for up to kMaxBatch rows of x.
#include "ops/formats/gguf_group.cuh"

namespace kbitq {
namespace {

constexpr int kWarp = 32, kWarps = 4;  // rows of W that a CTA has
constexpr int kMaxBatch = 4;

// What a lane adds to its sums: the products of a group with the same columns of B rows of x.
template <bool Min, typename T, int B>
__device__ __forceinline__ void add_group(float (&acc)[B], const GgufGroup& group, const T* x, int64_t cols) {
#pragma unroll
    for (int b = 0; b < B; ++b) {
        const Sixteen<T> xs = *reinterpret_cast<const Sixteen<T>*>(x + b * cols);
        float dot = 0.0f, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            const float v = Element<T>::widen(xs.value[j]);
            dot = fmaf(static_cast<float>(group.q[j]), v, dot);
            if (Min) sum += v;
        }
        acc[b] = fmaf(group.scale, dot, acc[b]);
        if (Min) acc[b] = fmaf(-group.min, sum, acc[b]);
    }
}

// Row blockIdx.x * kWarps + warp of expert blockIdx.y, times rows [first, first + B) of its x.
template <typename Block, typename T, int B>
__global__ void __launch_bounds__(kWarp* kWarps) linear_kernel(GgufLinearArgs a, int64_t first) {
    const int lane = threadIdx.x % kWarp;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp, expert = blockIdx.y;
    if (row >= a.rows) return;
    const int groups = static_cast<int>(a.cols / kGroup);
    const uint8_t* blocks = a.blocks + (expert * a.rows + row) * (a.cols / Block::kValues) * Block::kBytes;
    const T* x = static_cast<const T*>(a.x) + (expert * a.batch + first) * a.cols;
    float acc[B] = {};
    for (int i = lane; i < groups; i += kWarp) {
        GgufGroup group;
        Block::group(group, blocks + static_cast<int64_t>(i / Block::kGroups) * Block::kBytes, i % Block::kGroups);
        add_group<Block::kMin, T, B>(acc, group, x + static_cast<int64_t>(i) * kGroup, a.cols);
    }
    T* y = static_cast<T*>(a.y) + (expert * a.batch + first) * a.rows + row;
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
        for (int offset = kWarp / 2; offset > 0; offset /= 2) acc[b] += __shfl_xor_sync(0xFFFFFFFFu, acc[b], offset);
        if (lane == 0) y[b * a.rows] = Element<T>::round(acc[b]);
    }
}

template <typename Block, typename T>
void multiply(const GgufLinearArgs& a, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(divide_up(a.rows, kWarps)), static_cast<unsigned>(a.experts));
    int64_t m = 0;
    for (; m + kMaxBatch <= a.batch; m += kMaxBatch)
        linear_kernel<Block, T, kMaxBatch><<<grid, kWarp * kWarps, 0, stream>>>(a, m);
    for (; m < a.batch; ++m) linear_kernel<Block, T, 1><<<grid, kWarp * kWarps, 0, stream>>>(a, m);
}

}  // namespace

void linear_gguf_cuda(const GgufLinearArgs& a, int device, void* stream) {
    if (a.rows == 0 || a.batch == 0 || a.experts == 0) return;
    const DeviceGuard guard(device);
    check_aligned(a.x, "linear_gguf");
    with_gguf_block(a.type, [&](auto type) {
        with_dtype(a.dtype, [&](auto element) {
            multiply<decltype(type), typename decltype(element)::Type>(a, static_cast<cudaStream_t>(stream));
        });
    });
    check_cuda(cudaGetLastError(), "linear_gguf", matrix_shape(a.rows, a.cols));
}

}  // namespace kbitq
