// From checked arguments to the device's version of an op, outside the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

#include "bindings/tensor_view.h"

namespace kbitq {

#if defined(KBITQ_HAS_CUDA)
#define KBITQ_CUDA_OP(op) op
#define KBITQ_CUDA_CALL(call) call
#else
[[noreturn]] inline void throw_no_cuda() {
    throw std::runtime_error("this build of kbitq has no CUDA kernels (`kbitq env` says why)");
}
template <typename Args>
void no_cuda(const Args&, int, void*) {
    throw_no_cuda();
}
#define KBITQ_CUDA_OP(op) no_cuda
#define KBITQ_CUDA_CALL(call) throw_no_cuda()
#endif

inline void check_threads(int threads) {
    if (threads < 1) throw py::value_error("threads: must be at least 1");
}

// Runs the CPU or the CUDA version of an op.
template <typename Args>
void launch(void (*cpu)(const Args&, int), void (*cuda)(const Args&, int, void*), const Args& args, int device,
            int threads, uintptr_t stream) {
    check_threads(threads);
    py::gil_scoped_release unlocked;
    if (device == kCpu) {
        cpu(args, threads);
    } else {
        cuda(args, device, reinterpret_cast<void*>(stream));
    }
}

}  // namespace kbitq
