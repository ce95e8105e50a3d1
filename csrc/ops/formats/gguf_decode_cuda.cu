// GGUF blocks to values on CUDA: a thread for each group of sixteen. Every operation is rounded on its own.
#include "ops/formats/gguf_group.cuh"

namespace kbitq {
namespace {

constexpr int kThreads = 256;

template <typename Block, typename T>
__global__ void __launch_bounds__(kThreads) decode_kernel(const uint8_t* blocks, int64_t groups, T* out) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < groups; i += step) {
        GgufGroup group;
        Block::group(group, blocks + i / Block::kGroups * Block::kBytes, static_cast<int>(i % Block::kGroups));
        Sixteen<T> values;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            const float scaled = __fmul_rn(group.scale, static_cast<float>(group.q[j]));
            values.value[j] = Element<T>::round(__fsub_rn(scaled, group.min));
        }
        *reinterpret_cast<Sixteen<T>*>(out + i * kGroup) = values;
    }
}

}  // namespace

void decode_gguf_cuda(const GgufDecodeArgs& a, int device, void* stream) {
    if (a.count == 0) return;
    const DeviceGuard guard(device);
    check_aligned(a.out, "decode_gguf");
    with_gguf_block(a.type, [&](auto type) {
        using Block = decltype(type);
        const int64_t groups = a.count * Block::kGroups;
        const unsigned grid = grid_for(divide_up(groups, kThreads), device, 32);
        with_dtype(a.dtype, [&](auto element) {
            using T = typename decltype(element)::Type;
            decode_kernel<Block, T>
                <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a.blocks, groups, static_cast<T*>(a.out));
        });
    });
    check_cuda(cudaGetLastError(), "decode_gguf", std::to_string(a.count) + " blocks");
}

}  // namespace kbitq
