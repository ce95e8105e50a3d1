// Where a kernel's dynamic shared memory begins.
#pragma once

#include "cuda/ptx.cuh"

namespace kbitq::tiled {

// The shared window of a kernel begins with 1 KB that the system keeps (sm_80 and later); the dynamic memory comes
// next, as the tiled kernels have no static one. So its address is known to the compiler but for the highest byte,
// which is the number of the CTA in its cluster.
constexpr int kSharedBase = 1024;
constexpr uint32_t kWindowMask = 0xFF000000u;

// The highest byte.
__device__ __forceinline__ uint32_t shared_window() {
    extern __shared__ __align__(1024) uint8_t shared[];
    return shared_address(shared) & kWindowMask;
}

// Every kernel that relies on kSharedBase checks it.
__device__ __forceinline__ void check_shared_base(const void* dynamic_shared) {
    if ((shared_address(dynamic_shared) & ~kWindowMask) != kSharedBase) __trap();
}

}  // namespace kbitq::tiled
