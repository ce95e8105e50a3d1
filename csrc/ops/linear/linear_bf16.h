// linear for bfloat16 rows of x on processors with AVX512_BF16: one instruction (vdpbf16ps) multiplies a block of W by
// 32 elements of x and adds neighbours in float32.
#pragma once

#include "codecs/planes_bf16.h"
#include "codecs/trellis_bf16.h"
#include "ops/linear/linear_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <typename C>
struct Bf16Product {
    using X = uint16_t;
    static constexpr int kRowsBy8 = 2, kRowsBy4 = 4, kRowsBy2 = 4;  // as in FloatProduct

    Bf16Decoder<C> decoder;
    explicit Bf16Product(const float* codebook) : decoder(codebook) {}

    inline __m512bh decode_block(const uint32_t* words) const { return decoder.decode_block(words); }
    static inline F multiply(__m512bh levels, const uint16_t* x) {
        return _mm512_dpbf16_ps(_mm512_setzero_ps(), levels, reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)));
    }
};

}  // namespace
}  // namespace kbitq::KBITQ_ISA
