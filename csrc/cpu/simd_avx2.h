// AVX2: the vocabulary that the vector kernels (codecs/*_simd.h, ops/*/*_simd.h) are written in, 8 float lanes, a block
// in four vectors. cpu/simd_avx512.h has the same names.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "format/block.h"

namespace kbitq::avx2 {
namespace {  // internal: the codec and the matmul are compiled with different flags

constexpr int kLanes = 8;
constexpr int kLogLanes = 3;
constexpr int kVectors = kBlock / kLanes;

using F = __m256;
using I = __m256i;
using M = __m256;  // all ones or all zeros in a lane

inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline void store(uint16_t* p, __m128i a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a); }
// Past the caches, for outputs that they cannot hold: no line is read before it is written. Aligned to the vector;
// whoever streams ends with stream_fence.
inline void stream(float* p, F a) { _mm256_stream_ps(p, a); }
inline void stream(uint16_t* p, __m128i a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), a); }
inline void stream_fence() { _mm_sfence(); }
inline F splat(float v) { return _mm256_set1_ps(v); }
inline I splat_int(int v) { return _mm256_set1_epi32(v); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F magnitude(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F and_bits(F a, const uint32_t* bits) {
    return _mm256_and_ps(a, _mm256_loadu_ps(reinterpret_cast<const float*>(bits)));
}
inline I load(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store(int32_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
inline I or_int(I a, I b) { return _mm256_or_si256(a, b); }
inline I double_int(I a) { return _mm256_add_epi32(a, a); }

inline I shift_left(I a, int bits) { return _mm256_slli_epi32(a, bits); }
inline I shift_right(I a, int bits) { return _mm256_srli_epi32(a, bits); }
inline I as_bits(F a) { return _mm256_castps_si256(a); }
// kLanes bytes, one a lane.
inline I load_bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
// kLanes indices below 16 as kLanes / 2 bytes; of two neighbours, the first is the high half.
inline void store_nibbles(uint8_t* p, I index) {
    const I pairs = _mm256_or_si256(_mm256_slli_epi64(index, 4), _mm256_srli_epi64(index, 32));
    const __m128i low = _mm256_castsi256_si128(pairs), high = _mm256_extracti128_si256(pairs, 1);
    p[0] = static_cast<uint8_t>(_mm_extract_epi8(low, 0)), p[1] = static_cast<uint8_t>(_mm_extract_epi8(low, 8));
    p[2] = static_cast<uint8_t>(_mm_extract_epi8(high, 0)), p[3] = static_cast<uint8_t>(_mm_extract_epi8(high, 8));
}
// a0 b0 a1 b1 ...: kLanes of them, then the rest.
inline void interleave(F a, F b, F& first, F& second) {
    const F low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    first = _mm256_permute2f128_ps(low, high, 0x20);
    second = _mm256_permute2f128_ps(low, high, 0x31);
}

inline M greater(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline M equal(I a, I b) { return _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)); }
inline F where(M m, F a, F b) { return _mm256_blendv_ps(b, a, m); }  // a where the mask is set, else b
inline I where(M m, I a, I b) { return _mm256_blendv_epi8(b, a, _mm256_castps_si256(m)); }
inline uint32_t mask_bits(M m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
// index | (bit where the mask is set)
inline I or_where(I index, M m, int bit) {
    return _mm256_or_si256(index, _mm256_and_si256(_mm256_castps_si256(m), _mm256_set1_epi32(bit)));
}

// The 32 indices of a block as bytes: each plane's word is spread to bytes, its bit tested there. Byte p of the result
// is of the element whose byte of the word is `own_byte` and whose bit of that byte is `own_bit`.
template <int K>
[[gnu::always_inline]] inline I unpack_bytes(const uint32_t* words, I own_byte, I own_bit) {
    I bytes = _mm256_setzero_si256();
    for (int j = 0; j < K; ++j) {
        const I spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(words[j])), own_byte);
        const I set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own_bit), own_bit);
        bytes = _mm256_or_si256(bytes, _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(1 << j))));
    }
    return bytes;
}

// Element i in byte i.
template <int K>
inline I unpack_bytes(const uint32_t* words) {
    const I own_byte = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3,
                                        3, 3, 3, 3, 3);
    return unpack_bytes<K>(words, own_byte, _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull)));
}

// Indices of a block from its K plane words, in order: lane i of vector v is element 8v + i.
template <int K>
inline void unpack(I (&index)[kVectors], const uint32_t* words) {
    const I bytes = unpack_bytes<K>(words);
    const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
    index[0] = _mm256_cvtepu8_epi32(low);
    index[1] = _mm256_cvtepu8_epi32(_mm_srli_si128(low, 8));
    index[2] = _mm256_cvtepu8_epi32(high);
    index[3] = _mm256_cvtepu8_epi32(_mm_srli_si128(high, 8));
}

// The same, interleaved: lane i of vector v is element kVectors * i + v (cheaper; bits above the index are not cleared,
// which `lookup` does not mind).
template <int K>
inline void unpack_interleaved(I (&index)[kVectors], const uint32_t* words) {
    index[0] = unpack_bytes<K>(words);
    for (int v = 1; v < kVectors; ++v) index[v] = _mm256_srli_epi32(index[0], 8 * v);
}

// table[index] for N float entries, N a power of two; tables are padded to kLanes entries.
template <int N>
inline F lookup(const float* table, I index) {
    if constexpr (N <= kLanes) {
        return _mm256_permutevar8x32_ps(load(table), index);
    } else {
        constexpr int kToSign = N == 16 ? 28 : N == 32 ? 27 : N == 64 ? 26 : N == 128 ? 25 : 24;  // bit N/2 to the sign
        const F upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, kToSign));
        return _mm256_blendv_ps(lookup<N / 2>(table, index), lookup<N / 2>(table + N / 2, index), upper);
    }
}
inline F permute(F table, I index) { return _mm256_permutevar8x32_ps(table, index); }

// A table of 2^K floats, looked up for the 32 indices that the K plane words of a block hold.
//
// From 16 entries on the four bytes of a float are looked up each by itself, 32 of them an instruction and 16 entries
// at a time, and then put together:
//
//     index           p0 p1 p2 p3 p4 ...                a byte each
//     byte 0 of each  a0 a1 a2 a3 a4 ...   }  a0 b0 a1 b1 ...  }
//     byte 1          b0 b1 b2 b3 b4 ...   }                   }  a0 b0 c0 d0 a1 b1 c1 d1 ...
//     byte 2          c0 c1 c2 c3 c4 ...   }  c0 d0 c1 d1 ...  }
//     byte 3          d0 d1 d2 d3 d4 ...   }
//
// Those last steps take the bytes of each half of a vector in fours, 0 to 3 of both halves first, so the indices are
// laid out for the order in which the floats are wanted.
template <int K>
class BlockTable {
  public:
    explicit BlockTable(const float* table) {
        if constexpr (kBytes) {
            for (int i = 0; i < (1 << K); ++i) {
                uint8_t bytes[4];
                __builtin_memcpy(bytes, table + i, sizeof bytes);
                for (int b = 0; b < 4; ++b) {  // once for each half of a vector
                    uint8_t* at = bytes_[i / kChunk][b] + i % kChunk;
                    at[0] = at[kChunk] = bytes[b];
                }
            }
        } else {
            for (int i = 0; i < kLanes; ++i) floats_[i] = i < (1 << K) ? table[i] : 0.0f;
        }
    }

    template <bool kInterleaved>
    [[gnu::always_inline]] inline void look_up(F (&value)[kVectors], const uint32_t* words) const {
        if constexpr (kBytes) {
            look_up_bytes(value, kInterleaved ? interleaved_bytes(words) : row_bytes(words));
        } else {
            I index[kVectors];
            if constexpr (kInterleaved) unpack_interleaved<K>(index, words);
            if constexpr (!kInterleaved) unpack<K>(index, words);
            for (int v = 0; v < kVectors; ++v) value[v] = lookup<(1 << K)>(floats_, index[v]);
        }
    }

  private:
    static constexpr bool kBytes = K >= 4;
    static constexpr int kChunk = 16;  // entries of a table of bytes that one instruction looks up
    static constexpr int kChunks = kBytes ? (1 << K) / kChunk : 1;

    // So that lane i of vector v is element kLanes * v + i.
    static inline I row_bytes(const uint32_t* words) {
        const I own_byte = _mm256_set1_epi64x(0x0101010100000000ll);
        const I later = _mm256_setr_epi64x(0, 0x0202020202020202ll, 0, 0x0202020202020202ll);
        const I own_bit = _mm256_setr_epi64x(0x0804020108040201ll, 0x0804020108040201ll,
                                             static_cast<long long>(0x8040201080402010ull),
                                             static_cast<long long>(0x8040201080402010ull));
        return unpack_bytes<K>(words, _mm256_add_epi8(own_byte, later), own_bit);
    }

    // So that lane i of vector v is element kVectors * i + v.
    static inline I interleaved_bytes(const uint32_t* words) {
        const I own_byte =
            _mm256_setr_epi64x(0x0101000001010000ll, 0x0101000001010000ll, 0x0303020203030202ll, 0x0303020203030202ll);
        const I own_bit = _mm256_setr_epi64x(0x2002200210011001ll, static_cast<long long>(0x8008800840044004ull),
                                             0x2002200210011001ll, static_cast<long long>(0x8008800840044004ull));
        return unpack_bytes<K>(words, own_byte, own_bit);
    }

    [[gnu::always_inline]] inline void look_up_bytes(F (&value)[kVectors], I index) const {
        I byte[4];
        for (int c = 0; c < kChunks; ++c) {
            // Indices of other chunks get the high bit, for which the instruction gives 0.
            const I within =
                kChunks == 1 ? index
                             : _mm256_adds_epu8(_mm256_sub_epi8(index, _mm256_set1_epi8(static_cast<char>(kChunk * c))),
                                                _mm256_set1_epi8(0x70));
            for (int b = 0; b < 4; ++b) {
                const I found =
                    _mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const I*>(bytes_[c][b])), within);
                byte[b] = c == 0 ? found : _mm256_or_si256(byte[b], found);
            }
        }
        const I low01 = _mm256_unpacklo_epi8(byte[0], byte[1]), high01 = _mm256_unpackhi_epi8(byte[0], byte[1]);
        const I low23 = _mm256_unpacklo_epi8(byte[2], byte[3]), high23 = _mm256_unpackhi_epi8(byte[2], byte[3]);
        value[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low01, low23));
        value[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low01, low23));
        value[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(high01, high23));
        value[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(high01, high23));
    }

    union {
        alignas(64) float floats_[kLanes];
        alignas(64) uint8_t bytes_[kChunks][4][2 * kChunk];
    };
};

inline F load_bf16(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

inline __m128i to_bf16(F a) {
    const I bits = _mm256_castps_si256(a);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const I rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
inline __m128i to_f16(F a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#if defined(__FMA__)
inline F fused(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }  // a * b + c; for the matmul, never for the codec
#endif
inline float sum(F a) {
    const __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)));
}

inline float tree_max4(__m128 a) {
    const __m128 by2 = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(by2, _mm_movehdup_ps(by2)));
}
inline float largest(F a) { return tree_max4(_mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1))); }

// The tree of format.md section 3 over the 32 terms of a block: i+16 to i, then i+8, i+4, i+2, i+1.
inline float tree_sum(const F (&term)[kVectors]) {
    const F by8 = add(add(term[0], term[2]), add(term[1], term[3]));
    const __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
    const __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)));
}

// The same tree in float64; a block is eight vectors of four doubles.
using D = __m256d;
constexpr int kDoubleVectors = 8;
inline D widen(const F (&block)[kVectors], int q) {
    const F v = block[q / 2];
    return _mm256_cvtps_pd(q % 2 ? _mm256_extractf128_ps(v, 1) : _mm256_castps256_ps128(v));
}
inline D sub(D a, D b) { return _mm256_sub_pd(a, b); }
inline D mul(D a, D b) { return _mm256_mul_pd(a, b); }
inline D max(D a, D b) { return _mm256_max_pd(a, b); }
inline D magnitude(D a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
inline D zero_double() { return _mm256_setzero_pd(); }
inline double largest(D a) {
    const __m128d by2 = _mm_max_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_max_sd(by2, _mm_unpackhi_pd(by2, by2)));
}
inline double tree_sum(const D (&term)[kDoubleVectors]) {
    D by16[4];
    for (int q = 0; q < 4; ++q) by16[q] = _mm256_add_pd(term[q], term[q + 4]);
    const D by4 = _mm256_add_pd(_mm256_add_pd(by16[0], by16[2]), _mm256_add_pd(by16[1], by16[3]));
    const __m128d by2 = _mm_add_pd(_mm256_castpd256_pd128(by4), _mm256_extractf128_pd(by4, 1));
    return _mm_cvtsd_f64(_mm_add_sd(by2, _mm_unpackhi_pd(by2, by2)));
}

// Integer maxima of the magnitudes' bits, for the scan.
struct BitScan {
    static constexpr int kBytes = 32;
    I best = _mm256_setzero_si256();
    static I read(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    void take(const uint16_t* p) {
        best = _mm256_max_epu16(best, _mm256_and_si256(read(p), _mm256_set1_epi16(0x7FFF)));
    }
    void take(const float* p) {
        best = _mm256_max_epu32(best, _mm256_and_si256(read(p), _mm256_set1_epi32(0x7FFFFFFF)));
    }
    uint32_t result(uint16_t) const { return largest_of<uint16_t>(); }
    uint32_t result(float) const { return largest_of<uint32_t>(); }

  private:
    template <typename Lane>
    uint32_t largest_of() const {
        alignas(32) Lane lane[kBytes / sizeof(Lane)];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lane), best);
        uint32_t most = 0;
        for (Lane v : lane) most = v > most ? v : most;
        return most;
    }
};

}  // namespace
}  // namespace kbitq::avx2
