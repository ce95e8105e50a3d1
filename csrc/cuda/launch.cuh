// What every CUDA op does around its kernels: the tensor's device for the length of a call, a grid that fits the GPU,
// and errors turned into exceptions that say which op and which shapes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace kbitq {

// Throws std::runtime_error "OP WHAT: CUDA: what the runtime says" unless error is success.
inline void check_cuda(cudaError_t error, const char* op, const std::string& what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();
    throw std::runtime_error(std::string(op) + " " + what + ": CUDA: " + cudaGetErrorString(error));
}

inline std::string matrix_shape(int64_t rows, int64_t cols) {
    return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

// Makes `device` current, and the caller's device again at the end of the scope.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check_cuda(cudaGetDevice(&before_), "device", "query");
        changed_ = before_ != device;
        if (changed_) check_cuda(cudaSetDevice(device), "device", "cuda:" + std::to_string(device));
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
};

inline int multiprocessors(int device) {
    constexpr int kRemembered = 64;
    static int counts[kRemembered] = {};  // the same value whoever writes it
    if (device < kRemembered && counts[device] > 0) return counts[device];
    int count = 0;
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "device", "query");
    if (device < kRemembered) counts[device] = count;
    return count;
}

// CTAs of a grid-stride loop over `work` CTAs' worth: at most `per_sm` for each multiprocessor, and at least one, so
// that what the first CTA does besides is done.
inline unsigned grid_for(int64_t work, int device, int64_t per_sm) {
    const int64_t most = multiprocessors(device) * per_sm;
    return static_cast<unsigned>(std::max<int64_t>(1, std::min(work, most)));
}

// Are all of these addresses multiples of 16 (or null)?
inline bool all_aligned16(std::initializer_list<const void*> pointers) {
    uintptr_t bits = 0;
    for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
    return bits % 16 == 0;
}

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace kbitq
