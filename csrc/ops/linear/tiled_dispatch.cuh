// What the launchers of the matmul kernels share: from a product's arguments to a kernel's template parameters.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "cuda/launch.cuh"
#include "ops/linear/tiled.h"

namespace kbitq::matmul {

// Can rows of x be read 16 bytes at a time?
inline bool rows_in_vectors(const TileMatmulArgs& args) { return args.weight.cols % 8 == 0 && all_aligned16({args.x}); }

template <typename T>
struct TypeTag {
    using Type = T;
};

// Calls run(TypeTag<T>, std::integral_constant<int, K>) for the type of x and the bits of the tiles.
template <typename Run>
void with_instance(const char* op, const TileMatmulArgs& args, Run&& run) {
    with_bits(args.weight.k, [&](auto bits) {
        if constexpr (bits > kTileMaxBits) {
            throw std::runtime_error(std::string(op) + ": tiles have 2 to 5 bits");
        } else if (args.dtype == DType::f16) {
            run(TypeTag<__half>{}, bits);
        } else {
            run(TypeTag<__nv_bfloat16>{}, bits);
        }
    });
}

}  // namespace kbitq::matmul
