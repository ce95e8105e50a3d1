// THE format: how a tensor is cut into blocks and where the bits of a block lie (docs/format.md, sections 1 and 2).
//
// A block is 32 neighbours of a row. With K bits it owns K words of 32 bits: bit i of word j is bit j of element i's
// index.
//
//            element  31 30 29 ...  2  1  0
//   word 0    bit 0 [  .  .  .  ...  .  .  . ]   least significant bit of every index
//   word 1    bit 1 [  .  .  .  ...  .  .  . ]
//   ...
//   word K-1        [  .  .  .  ...  .  .  . ]   most significant
//
// plus one E4M4 scale byte: K + 0.25 bits a weight. Header only; g++ and nvcc both read it.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define KBITQ_HD static __host__ __device__ __forceinline__
#else
#define KBITQ_HD static inline  // internal: each instruction set keeps its own copy (cmake/simd.cmake)
#endif

namespace kbitq {

constexpr int kBlock = 32;  // elements in a block = bits in a word = lanes in a warp
constexpr int kMinBits = 2;
constexpr int kMaxBits = 8;
constexpr int kMaxLevels = 1 << kMaxBits;

// Blocks in a row of `cols` elements; the last one may be short.
KBITQ_HD constexpr int64_t blocks_per_row(int64_t cols) { return (cols + kBlock - 1) / kBlock; }

// Number of thresholds below zero = the index of an exact zero (format.md section 3: z).
KBITQ_HD int zero_index(const float* mid, int levels) {
    int z = 0;
    for (int j = 0; j + 1 < levels; ++j) z += 0.0f > mid[j];
    return z;
}

// Calls body with K as a compile-time constant: with_bits(k, [&](auto bits) { kernel<bits>(...); }).
template <typename Body>
static inline void with_bits(int k, Body&& body) {
    switch (k) {
        case 2: return body(std::integral_constant<int, 2>{});
        case 3: return body(std::integral_constant<int, 3>{});
        case 4: return body(std::integral_constant<int, 4>{});
        case 5: return body(std::integral_constant<int, 5>{});
        case 6: return body(std::integral_constant<int, 6>{});
        case 7: return body(std::integral_constant<int, 7>{});
        default: return body(std::integral_constant<int, 8>{});
    }
}

}  // namespace kbitq
