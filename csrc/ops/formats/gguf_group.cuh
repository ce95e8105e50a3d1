// What the CUDA kernels of GGUF blocks share. A lane has a group of sixteen at a time, so that neighbouring lanes read
// and write side by side.
#pragma once

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "formats/gguf_blocks.h"
#include "ops/formats/gguf.h"

namespace kbitq {
namespace {

// Sixteen elements, read or written as whole vectors: both lie at multiples of 32 bytes.
template <typename T>
struct alignas(16) Sixteen {
    T value[kGroup];
};

inline void check_aligned(const void* p, const char* op) {
    if (!all_aligned16({p}))
        throw std::runtime_error(std::string(op) + ": tensors must begin at a multiple of 16 bytes");
}

}  // namespace
}  // namespace kbitq
