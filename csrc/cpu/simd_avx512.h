// AVX-512: the vocabulary that the vector kernels (codecs/*_simd.h, ops/*/*_simd.h) are written in, 16 float lanes, a
// block in two vectors. cpu/simd_avx2.h has the same names. Include one of them per translation unit, inside the
// instruction set's own namespace rules.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "format/block.h"

namespace kbitq::avx512 {
namespace {  // internal: the codec and the matmul are compiled with different flags

constexpr int kLanes = 16;
constexpr int kLogLanes = 4;
constexpr int kVectors = kBlock / kLanes;

using F = __m512;
using I = __m512i;
using M = __mmask16;

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline void store(uint16_t* p, __m256i a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
// Past the caches, for outputs that they cannot hold: no line is read before it is written. Aligned to the vector;
// whoever streams ends with stream_fence.
inline void stream(float* p, F a) { _mm512_stream_ps(p, a); }
inline void stream(uint16_t* p, __m256i a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), a); }
inline void stream_fence() { _mm_sfence(); }
inline F splat(float v) { return _mm512_set1_ps(v); }
inline I splat_int(int v) { return _mm512_set1_epi32(v); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F magnitude(F a) {
    return _mm512_castsi512_ps(_mm512_and_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x7FFFFFFF)));
}
inline F and_bits(F a, const uint32_t* bits) {
    return _mm512_castsi512_ps(_mm512_and_epi32(_mm512_castps_si512(a), _mm512_loadu_si512(bits)));
}
inline I load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
inline I or_int(I a, I b) { return _mm512_or_epi32(a, b); }
inline I double_int(I a) { return _mm512_add_epi32(a, a); }

inline I shift_left(I a, int bits) { return _mm512_slli_epi32(a, static_cast<unsigned>(bits)); }
inline I shift_right(I a, int bits) { return _mm512_srli_epi32(a, static_cast<unsigned>(bits)); }
inline I as_bits(F a) { return _mm512_castps_si512(a); }
// kLanes bytes, one a lane.
inline I load_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// kLanes indices below 16 as kLanes / 2 bytes; of two neighbours, the first is the high half.
inline void store_nibbles(uint8_t* p, I index) {
    const I pairs = _mm512_or_si512(_mm512_slli_epi64(index, 4), _mm512_srli_epi64(index, 32));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtepi64_epi8(pairs));
}
// a0 b0 a1 b1 ...: kLanes of them, then the rest.
inline void interleave(F a, F b, F& first, F& second) {
    const I low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const I high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    first = _mm512_permutex2var_ps(a, low, b);
    second = _mm512_permutex2var_ps(a, high, b);
}

inline M greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline M equal(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
inline F where(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }  // a where the mask is set, else b
inline I where(M m, I a, I b) { return _mm512_mask_blend_epi32(m, b, a); }
inline uint32_t mask_bits(M m) { return m; }
// index | (bit where the mask is set)
inline I or_where(I index, M m, int bit) { return _mm512_mask_or_epi32(index, m, index, _mm512_set1_epi32(bit)); }

// The 32 indices of a block as 16-bit lanes, element i in lane i: a plane's word is the mask of its bit.
template <int K>
inline I unpack_halves(const uint32_t* words) {
    I halves = _mm512_maskz_set1_epi16(words[0], 1);
    for (int j = 1; j < K; ++j)
        halves = _mm512_mask_add_epi16(halves, words[j], halves, _mm512_set1_epi16(static_cast<short>(1 << j)));
    return halves;
}

// Indices of a block from its K plane words, in order: lane i of vector v is element 16v + i.
template <int K>
inline void unpack(I (&index)[kVectors], const uint32_t* words) {
    if constexpr (K <= 3) {  // so few planes are quicker as masks of 16 lanes
        for (int v = 0; v < kVectors; ++v) {
            index[v] = _mm512_setzero_si512();
            for (int j = 0; j < K; ++j) index[v] = or_where(index[v], static_cast<M>(words[j] >> (kLanes * v)), 1 << j);
        }
    } else {
        const I halves = unpack_halves<K>(words);
        index[0] = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
        index[1] = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(halves, 1));
    }
}

// The same, interleaved: lane i of vector v is element kVectors * i + v (cheaper; bits above the index are not cleared,
// which `lookup` does not mind).
template <int K>
inline void unpack_interleaved(I (&index)[kVectors], const uint32_t* words) {
    index[0] = unpack_halves<K>(words);
    index[1] = _mm512_srli_epi32(index[0], 16);
}

// table[index] for N float entries, N a power of two; tables are padded to kLanes entries.
template <int N>
[[gnu::always_inline]] inline F lookup(const float* table, I index) {
    if constexpr (N <= kLanes) {
        return _mm512_permutexvar_ps(index, load(table));
    } else if constexpr (N == 2 * kLanes) {
        return _mm512_permutex2var_ps(load(table), index, load(table + kLanes));
    } else {
        const M upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(N / 2));
        return _mm512_mask_blend_ps(upper, lookup<N / 2>(table, index), lookup<N / 2>(table + N / 2, index));
    }
}
inline F permute(F table, I index) { return _mm512_permutexvar_ps(index, table); }

// A table of 2^K floats, looked up for the 32 indices that the K plane words of a block hold.
template <int K>
class BlockTable {
  public:
    explicit BlockTable(const float* table) {
        for (int i = 0; i < kEntries; ++i) table_[i] = i < (1 << K) ? table[i] : 0.0f;
    }

    template <bool kInterleaved>
    [[gnu::always_inline]] inline void look_up(F (&value)[kVectors], const uint32_t* words) const {
        I index[kVectors];
        if constexpr (kInterleaved) unpack_interleaved<K>(index, words);
        if constexpr (!kInterleaved) unpack<K>(index, words);
        for (int v = 0; v < kVectors; ++v) value[v] = lookup<(1 << K)>(table_, index[v]);
    }

  private:
    static constexpr int kEntries = (1 << K) < kLanes ? kLanes : (1 << K);
    alignas(64) float table_[kEntries];
};

inline F load_bf16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Rounded with integers: _mm512_cvtneps_pbh would flush subnormals.
inline __m256i to_bf16(F a) {
    const I bits = _mm512_castps_si512(a);
    const I odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline __m256i to_f16(F a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline F fused(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c; for the matmul, never for the codec
inline float sum(F a) { return _mm512_reduce_add_ps(a); }

inline float largest(F a) { return _mm512_reduce_max_ps(a); }

// The tree of format.md section 3 over the 32 terms of a block: i+16 to i, then i+8, i+4, i+2, i+1.
inline float tree_sum(const F (&term)[kVectors]) {
    const F half = add(term[0], term[1]);
    const __m256 by8 = _mm256_add_ps(_mm512_castps512_ps256(half), _mm512_extractf32x8_ps(half, 1));
    const __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
    const __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)));
}

// The same tree in float64; a block is four vectors of eight doubles.
using D = __m512d;
constexpr int kDoubleVectors = 4;
inline D widen(const F (&block)[kVectors], int q) {
    const F v = block[q / 2];
    return _mm512_cvtps_pd(q % 2 ? _mm512_extractf32x8_ps(v, 1) : _mm512_castps512_ps256(v));
}
inline D sub(D a, D b) { return _mm512_sub_pd(a, b); }
inline D mul(D a, D b) { return _mm512_mul_pd(a, b); }
inline D max(D a, D b) { return _mm512_max_pd(a, b); }
inline D magnitude(D a) { return _mm512_andnot_pd(_mm512_set1_pd(-0.0), a); }
inline D zero_double() { return _mm512_setzero_pd(); }
inline double largest(D a) { return _mm512_reduce_max_pd(a); }
inline double tree_sum(const D (&term)[kDoubleVectors]) {
    const D by8 = _mm512_add_pd(_mm512_add_pd(term[0], term[2]), _mm512_add_pd(term[1], term[3]));
    const __m256d by4 = _mm256_add_pd(_mm512_castpd512_pd256(by8), _mm512_extractf64x4_pd(by8, 1));
    const __m128d by2 = _mm_add_pd(_mm256_castpd256_pd128(by4), _mm256_extractf128_pd(by4, 1));
    return _mm_cvtsd_f64(_mm_add_sd(by2, _mm_unpackhi_pd(by2, by2)));
}

// Integer maxima of the magnitudes' bits, for the scan.
struct BitScan {
    static constexpr int kBytes = 64;
    I best = _mm512_setzero_si512();
    void take(const uint16_t* p) {
        best = _mm512_max_epu16(best, _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7FFF)));
    }
    void take(const float* p) {
        best = _mm512_max_epu32(best, _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0x7FFFFFFF)));
    }
    uint32_t result(uint16_t) const {
        return _mm512_reduce_max_epu32(
            _mm512_max_epu32(_mm512_and_si512(best, _mm512_set1_epi32(0xFFFF)), _mm512_srli_epi32(best, 16)));
    }
    uint32_t result(float) const { return _mm512_reduce_max_epu32(best); }
};

}  // namespace
}  // namespace kbitq::avx512
