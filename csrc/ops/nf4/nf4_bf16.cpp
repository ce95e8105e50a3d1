// linear of NF4 for bfloat16 rows of x on processors with AVX512_BF16. 16-bit lanes hold two codes each, and one
// permute looks 32 of them up; one instruction multiplies by 32 elements of x and adds neighbours in float32. Levels
// are rounded to bfloat16, what their scale multiplies is exact.
#include "cpu/simd_avx512.h"

#define KBITQ_ISA avx512
#include "ops/nf4/nf4_simd.h"

namespace kbitq {
namespace avx512 {
namespace {

struct Bf16Product {
    using X = uint16_t;
    struct Levels {
        __m512bh even, odd;
    };
    static constexpr int kPairs = 32;
    static inline __m512bh look_up(__m512i index) {
        const __m256i levels = to_bf16(load(kNf4Level));  // twice, so that bit 4 of an index does not matter
        const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(levels), levels, 1);
        return reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(index, table));
    }
    static inline Levels decode(const uint8_t* codes) {
        const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        return {look_up(_mm512_srli_epi16(pairs, 4)), look_up(pairs)};
    }
    static inline __m512bh read(const uint16_t* x) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)); }
    static inline F add_product(F sum, const Levels& w, const uint16_t* x) {
        return _mm512_dpbf16_ps(_mm512_dpbf16_ps(sum, w.even, read(x)), w.odd, read(x + kPairs));
    }
};

}  // namespace
}  // namespace avx512

const Nf4Linear kAvx512Bf16Nf4Linear = {DType::bf16, avx512::Bf16Product::kPairs, 1,
                                        avx512::linear<avx512::Bf16Product>, nullptr};

}  // namespace kbitq
