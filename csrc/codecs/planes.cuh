// Planes, as the ops that go block by block see them: the words of a block <-> indices, eight neighbours at a time, in
// two registers at most.
//
// Byte t of a block's words w[0..K-1] holds the plane bits of elements 8t .. 8t+7. Four planes' bytes in one register
// are a 4 x 8 bit matrix; its transpose has an index's four bits together:
//
//     planes   byte j:    bit j of elements 7 6 5 4 3 2 1 0
//     nibbles  byte i:    [ element i+4 | element i ]            i = 0..3
//
// In the address of a bit, five bits [j1 j0 i2 i1 i0] for planes, that is the exchange of j1 with i1 and of j0 with i0:
// two delta swaps of four instructions each, and their own inverse.
#pragma once

#include <cstdint>

#include "format/block.h"

namespace kbitq {
namespace {

__device__ __forceinline__ uint32_t transpose_planes(uint32_t x) {
    uint32_t t = (x ^ (x >> 14)) & 0x0000CCCCu;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 7)) & 0x00AA00AAu;
    return x ^ t ^ (t << 7);
}

// Indices of eight elements. K <= 4: `low` alone, as nibbles (above); bits K..3 of a nibble are not defined.
// K > 4: bytes, elements 0..3 in `low` and 4..7 in `high`; bits K..7 of a byte are not defined.
template <int K>
struct EightIndices {
    uint32_t low, high;

    // Where element i's index begins in its register.
    __host__ __device__ __forceinline__ static constexpr int shift(int i) {
        return 8 * (i & 3) + (K <= 4 ? 4 * (i >> 2) : 0);
    }

    // Element i's index in the low bits; what is above them belongs to others.
    __device__ __forceinline__ uint32_t at(int i) const { return (K <= 4 || i < 4 ? low : high) >> shift(i); }
};

constexpr uint32_t kLowNibbles = 0x0F0F0F0Fu;

// The selector of __byte_perm that takes byte t of each of two words into bytes 0 and 1.
__device__ __forceinline__ uint32_t byte_of_two(int t) { return 0x40u + 0x11u * t; }

// Byte t of the words as one register, bytes past the last plane not defined; `selector` = byte_of_two(t).
template <int Planes>
__device__ __forceinline__ uint32_t gather_bytes(const uint32_t* w, uint32_t selector) {
    const uint32_t first = Planes > 1 ? __byte_perm(w[0], w[1], selector) : __byte_perm(w[0], 0, selector);
    if constexpr (Planes <= 2) return first;
    const uint32_t second = Planes > 3 ? __byte_perm(w[2], w[3], selector) : __byte_perm(w[2], 0, selector);
    return __byte_perm(first, second, 0x5410);
}

template <int K>
__device__ __forceinline__ EightIndices<K> indices_of_planes(const uint32_t (&w)[K], uint32_t selector) {
    const uint32_t low = transpose_planes(gather_bytes<(K < 4 ? K : 4)>(w, selector));
    if constexpr (K <= 4) {
        return {low, 0};
    } else {
        const uint32_t high = transpose_planes(gather_bytes<K - 4>(w + 4, selector));
        return {(low & kLowNibbles) | ((high << 4) & ~kLowNibbles), ((low >> 4) & kLowNibbles) | (high & ~kLowNibbles)};
    }
}

// Four registers of bytes as a 4 x 4 byte matrix, transposed: the same byte of each group becomes a word.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&group)[4], uint32_t (&word)[4]) {
    const uint32_t a = __byte_perm(group[0], group[1], 0x5140), b = __byte_perm(group[2], group[3], 0x5140);
    const uint32_t c = __byte_perm(group[0], group[1], 0x7362), d = __byte_perm(group[2], group[3], 0x7362);
    word[0] = __byte_perm(a, b, 0x5410);
    word[1] = __byte_perm(a, b, 0x7632);
    word[2] = __byte_perm(c, d, 0x5410);
    word[3] = __byte_perm(c, d, 0x7632);
}

// The K words of a block from its indices in four groups of eight; here the bits above an index must be zero.
template <int K>
__device__ __forceinline__ void planes_of_indices(const EightIndices<K> (&group)[4], uint32_t (&plane)[K]) {
    uint32_t nibbles[4], word[4];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        if constexpr (K <= 4) {
            nibbles[g] = transpose_planes(group[g].low);
        } else {
            nibbles[g] = transpose_planes((group[g].low & kLowNibbles) | ((group[g].high << 4) & ~kLowNibbles));
        }
    }
    transpose_bytes(nibbles, word);
#pragma unroll
    for (int j = 0; j < (K < 4 ? K : 4); ++j) plane[j] = word[j];
    if constexpr (K > 4) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            nibbles[g] = transpose_planes(((group[g].low >> 4) & kLowNibbles) | (group[g].high & ~kLowNibbles));
        }
        transpose_bytes(nibbles, word);
#pragma unroll
        for (int j = 4; j < K; ++j) plane[j] = word[j - 4];
    }
}

// What dequantize and stats ask of a codec.
template <int K>
struct Planes {
    static constexpr int kWords = K;            // of a block
    static constexpr int kIndexBits = K;        // of an index into the codebook
    static constexpr int kScaleBlocks = 1;      // neighbouring blocks of a row that share a scale
    static constexpr bool kFloatScales = true;  // scales may be float32 instead of bytes
    using Indices = EightIndices<K>;

    // The indices of elements 8t .. 8t + 7.
    static __device__ __forceinline__ Indices indices(const uint32_t (&w)[K], int t) {
        return indices_of_planes<K>(w, byte_of_two(t));
    }
};

}  // namespace
}  // namespace kbitq
