// scan on the GPU: one read at the speed of memory. Magnitudes are compared as integers (their order is that of the
// floats, with NaN and infinity on top); only a thread that meets one of those looks at its elements again. The results
// of the CTAs meet in the outputs by atomics whose result no order can change, so no workspace is needed.
#include <climits>

#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "format/scale_e4m4.h"
#include "ops/codec/scan.h"

namespace kbitq {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;                         // 16-byte loads in flight of a thread
constexpr int kCtasPerSm = 16;                    // of a grid-stride loop: two rounds
constexpr unsigned long long kNone = ULLONG_MAX;  // "no index": -1 as int64

struct Found {
    uint32_t most = 0;  // float bits of the largest finite magnitude
    unsigned long long count = 0, first = kNone;

    __device__ __forceinline__ void take(uint32_t magnitude_bits, int64_t index) {
        if (magnitude_bits < 0x7F800000u) {
            most = max(most, magnitude_bits);
        } else {
            ++count;
            first = min(first, static_cast<unsigned long long>(index));
        }
    }
};

template <typename T>
__device__ __forceinline__ void take_element(Found& found, const void* w, int64_t i) {
    found.take(float_bits(fabsf(load_element<T>(w, i))), i);
}

// The magnitudes of 16 bytes as integers whose top bits are exponent and mantissa; below them a pair's upper half
// carries the lower one along, which cannot change the order of the upper halves.
template <typename T>
__device__ __forceinline__ uint32_t largest(const uint4& chunk) {
    const uint32_t word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        most = max(most, word[i] << 1);
        if constexpr (sizeof(T) != 4) most = max(most, word[i] << 17);
    }
    return most;
}

// A magnitude as `largest` gives it, as float bits.
template <typename T>
__device__ __forceinline__ uint32_t magnitude_bits(uint32_t shifted) {
    if constexpr (sizeof(T) == 4) return shifted >> 1;
    if constexpr (Element<T>::kDType == DType::bf16) return (shifted >> 17) << 16;
    return float_bits(Element<__half>::widen_bits(shifted >> 17));
}

template <typename T>
__device__ __forceinline__ void scan_chunks(Found& found, const void* w, int64_t head, int64_t chunks) {
    constexpr int kElements = 16 / sizeof(T);
    constexpr uint32_t kInfinity = Element<T>::kDType == DType::f16 ? 0xF8000000u : 0xFF000000u;  // shifted left by one
    const auto* source = reinterpret_cast<const uint4*>(static_cast<const char*>(w) + head * (16 / kElements));
    const int64_t stride = int64_t{gridDim.x} * kThreads * kAhead;
    uint32_t most = 0;
    for (int64_t c = int64_t{blockIdx.x} * kThreads * kAhead + threadIdx.x; c < chunks; c += stride) {
        uint4 chunk[kAhead];
#pragma unroll
        for (int q = 0; q < kAhead; ++q) {
            chunk[q] = c + q * kThreads < chunks ? source[c + q * kThreads] : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int q = 0; q < kAhead; ++q) {
            const uint32_t m = largest<T>(chunk[q]);
            if (m < kInfinity) {
                most = max(most, m);
            } else {
                const int64_t begin = head + (c + q * kThreads) * kElements;
                for (int i = 0; i < kElements; ++i) take_element<T>(found, w, begin + i);
            }
        }
    }
    found.most = max(found.most, magnitude_bits<T>(most));
}

__device__ __forceinline__ void merge(const Found& found, float* amax, int64_t* status) {
    const auto as_count = [](int64_t* p) { return reinterpret_cast<unsigned long long*>(p); };
    uint32_t most = found.most;
#pragma unroll
    for (int half = 16; half > 0; half /= 2) most = max(most, __shfl_xor_sync(~0u, most, half));
    __shared__ uint32_t cta_most[kThreads / 32];
    if (threadIdx.x % 32 == 0) cta_most[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < kThreads / 32; ++i) most = max(most, cta_most[i]);
        atomicMax(reinterpret_cast<uint32_t*>(amax), most);
    }
    if (found.count == 0) return;
    atomicAdd(as_count(status), found.count);
    atomicMin(as_count(status + 1), found.first);
}

__global__ void scan_begin_kernel(float* amax, int64_t* status) {
    *amax = 0.0f;
    status[0] = 0;
    status[1] = -1;
}

// Elements 0 .. head-1 and those after the last chunk are taken one by one.
template <typename T>
__global__ void __launch_bounds__(kThreads) scan_kernel(const ScanArgs a, int64_t head, int64_t chunks) {
    constexpr int kElements = 16 / sizeof(T);
    Found found;
    scan_chunks<T>(found, a.w, head, chunks);
    if (blockIdx.x == 0) {
        const int64_t tail = head + chunks * kElements;
        for (int64_t i = threadIdx.x; i < head; i += kThreads) take_element<T>(found, a.w, i);
        for (int64_t i = tail + threadIdx.x; i < a.count; i += kThreads) take_element<T>(found, a.w, i);
    }
    merge(found, a.amax, a.status);
}

}  // namespace

void scan_cuda(const ScanArgs& a, int device, void* stream) {
    const DeviceGuard guard(device);
    const int64_t size = dtype_size(a.dtype), misaligned = reinterpret_cast<uintptr_t>(a.w) % 16;
    const int64_t head = std::min<int64_t>(a.count, misaligned ? (16 - misaligned) / size : 0);
    const int64_t chunks = (a.count - head) * size / 16;
    const unsigned grid = grid_for(divide_up(chunks, kThreads * kAhead), device, kCtasPerSm);
    const auto on = static_cast<cudaStream_t>(stream);
    scan_begin_kernel<<<1, 1, 0, on>>>(a.amax, a.status);
    with_dtype(a.dtype, [&](auto element) {
        scan_kernel<typename decltype(element)::Type><<<grid, kThreads, 0, on>>>(a, head, chunks);
    });
    check_cuda(cudaGetLastError(), "scan", "of " + std::to_string(a.count) + " elements");
}

}  // namespace kbitq
