// What the readers of GGUF blocks (gguf_blocks.h) are written with: loads of little-endian fields, and eight or sixteen
// small codes at a time. Compiled once for each instruction set, and by nvcc for the device alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "format/half.h"
#if defined(__SSSE3__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define KBITQ_GGUF static __device__ __forceinline__
#define KBITQ_GGUF_TABLE static __device__ const
#else
#define KBITQ_GGUF [[maybe_unused, gnu::always_inline]] static inline
#define KBITQ_GGUF_TABLE [[maybe_unused]] static constexpr
#endif

namespace kbitq {
namespace {

constexpr int kGroup = 16;  // codes that are read at a time
constexpr uint64_t kBytes01 = 0x0101010101010101ull;

// Sixteen neighbours of a block: value i is scale * q[i] - min, two operations rounded each on its own.
struct GgufGroup {
    alignas(16) int8_t q[kGroup];
    float scale;
    float min;
};

#if defined(__CUDACC__)  // blocks of an even size lie at even addresses
KBITQ_GGUF uint32_t load_u16(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }
KBITQ_GGUF float load_half(const uint8_t* p) {
    return __half2float(__ushort_as_half(*reinterpret_cast<const uint16_t*>(p)));
}
#else
KBITQ_GGUF uint32_t load_u16(const uint8_t* p) {
    uint16_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
KBITQ_GGUF float load_half(const uint8_t* p) {
#if defined(__F16C__)
    return _cvtsh_ss(static_cast<uint16_t>(load_u16(p)));
#else
    return f16_to_float(static_cast<uint16_t>(load_u16(p)));
#endif
}
#endif
KBITQ_GGUF uint32_t load_u32(const uint8_t* p) { return load_u16(p) | load_u16(p + 2) << 16; }

// q[i] = ((bytes[i] >> shift) & mask) + offset
KBITQ_GGUF void take_field(int8_t* q, const uint8_t* bytes, int shift, int mask, int offset) {
    for (int i = 0; i < kGroup; ++i) q[i] = static_cast<int8_t>(((bytes[i] >> shift) & mask) + offset);
}

// q[i] = low field | one or two high bits above it, + offset
KBITQ_GGUF void take_two(int8_t* q, const uint8_t* low, int shift, const uint8_t* high, int high_shift, int high_mask,
                         int offset) {
    for (int i = 0; i < kGroup; ++i) {
        const int upper = ((high[i] >> high_shift) & high_mask) << 4;
        q[i] = static_cast<int8_t>((((low[i] >> shift) & 15) | upper) + offset);
    }
}

KBITQ_GGUF void put_eight(int8_t* q, uint64_t bytes) { std::memcpy(q, &bytes, sizeof bytes); }

// q[i] = the level of index[i] & 15, of sixteen levels in two words.
struct Levels16 {
    uint64_t low, high;
};
KBITQ_GGUF void take_levels(int8_t* q, Levels16 levels, const uint8_t* bytes, int shift) {
#if defined(__CUDACC__)  // four at a time: byte permutes of either half of the table, one of them chosen by the fourth
                         // bit
    for (int i = 0; i < kGroup; i += 4) {
        const uint32_t word =
            bytes[i] | bytes[i + 1] << 8 | bytes[i + 2] << 16 | static_cast<uint32_t>(bytes[i + 3]) << 24;
        const uint32_t index = word >> shift & 0x0F0F0F0Fu, pairs = (index | index >> 4) & 0x00FF00FFu;
        const uint32_t three = (pairs | pairs >> 8) & 0x7777u;
        const uint32_t upper = (index >> 3 & 0x01010101u) * 0xFFu;
        const uint32_t low =
            __byte_perm(static_cast<uint32_t>(levels.low), static_cast<uint32_t>(levels.low >> 32), three);
        const uint32_t high =
            __byte_perm(static_cast<uint32_t>(levels.high), static_cast<uint32_t>(levels.high >> 32), three);
        const uint32_t found = (low & ~upper) | (high & upper);
        for (int j = 0; j < 4; ++j) q[i + j] = static_cast<int8_t>(found >> 8 * j);
    }
#elif defined(__SSSE3__)
    const __m128i table = _mm_set_epi64x(static_cast<long long>(levels.high), static_cast<long long>(levels.low));
    const __m128i index = _mm_srli_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)), shift);
    _mm_store_si128(reinterpret_cast<__m128i*>(q), _mm_shuffle_epi8(table, _mm_and_si128(index, _mm_set1_epi8(15))));
#else
    for (int i = 0; i < kGroup; ++i) {
        const int index = (bytes[i] >> shift) & 15;
        q[i] = static_cast<int8_t>((index < 8 ? levels.low : levels.high) >> 8 * (index & 7));
    }
#endif
}

// The levels of IQ4: near a normal density's quantiles.  -127 -104 -83 -65 -49 -35 -22 -10  1 13 25 38 53 69 89 113
KBITQ_GGUF Levels16 iq4_levels() { return {0xF6EADDCFBFAD9881ull, 0x7159453526190D01ull}; }
// Twice the values of E2M1: 0 1 2 3 4 6 8 12, and their negatives (ggml writes -0 as 0).
KBITQ_GGUF Levels16 e2m1_levels() { return {0x0C08060403020100ull, 0xF4F8FAFCFDFEFF00ull}; }

// Eight codes of two bits each, the first in the lowest bits, as bytes.
KBITQ_GGUF uint64_t spread2(uint32_t codes) {
    uint64_t x = codes;
    x = (x | x << 24) & 0x000000FF000000FFull;
    x = (x | x << 12) & 0x000F000F000F000Full;
    return (x | x << 6) & 0x0303030303030303ull;
}

// Two rows of four codes of three bits each, as bytes.
KBITQ_GGUF uint64_t spread3(uint32_t first, uint32_t second) {
    uint64_t x = first | static_cast<uint64_t>(second) << 32;
    x = (x | x << 10) & 0x003F003F003F003Full;
    return (x | x << 5) & 0x0707070707070707ull;
}

// Bytes (all positive) negated where their bit of `signs` is set.
KBITQ_GGUF uint64_t negate_where(uint64_t bytes, uint32_t signs) {
    const uint64_t spread = (signs * kBytes01) & 0x8040201008040201ull;
    const uint64_t one = (((spread + 0x7F7F7F7F7F7F7F7Full) | spread) >> 7) & kBytes01;
    return (bytes ^ one * 0xFF) + one;
}

// Seven signs are stored; the eighth makes their number even.
KBITQ_GGUF uint32_t even_signs(uint32_t seven) {
    uint32_t parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    return seven | ((parity ^ parity >> 1) & 1) << 7;
}

}  // namespace
}  // namespace kbitq
