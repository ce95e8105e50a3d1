// The codec `planes` for bfloat16 products. Its levels lie in a register as bfloat16 and are looked up there: rounding
// two vectors of float32 levels for each block would cost more than all that is done here.
//
//     K plane words    masks of 32 lanes: index bit j is plane j        K operations
//     indices          one permute of 16-bit levels (K <= 5)            1
#pragma once

#include "codecs/block_bf16.h"
#include "codecs/planes_simd.h"
#include "format/half.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <int K>
class Bf16Decoder<Planes<K>> {
  public:
    explicit Bf16Decoder(const float* codebook) {
        alignas(64) uint16_t levels[kTables * kTableLevels] = {};
        for (int i = 0; i < (1 << K); ++i) levels[i] = float_to_bf16(codebook[i]);
        for (int t = 0; t < kTables; ++t) table_[t] = _mm512_load_si512(levels + t * kTableLevels);
    }

    [[gnu::always_inline]] inline __m512bh decode_block(const uint32_t* words) const {
        const I index = unpack_halves<(K < 6 ? K : 6)>(words);
        if constexpr (K <= 5) {
            return bh(_mm512_permutexvar_epi16(index, table_[0]));
        } else if constexpr (K == 6) {
            return bh(pick(index, 0));
        } else if constexpr (K == 7) {
            return bh(_mm512_mask_blend_epi16(words[6], pick(index, 0), pick(index, 2)));
        } else {
            const __m512i low = _mm512_mask_blend_epi16(words[6], pick(index, 0), pick(index, 2));
            const __m512i high = _mm512_mask_blend_epi16(words[6], pick(index, 4), pick(index, 6));
            return bh(_mm512_mask_blend_epi16(words[7], low, high));
        }
    }

  private:
    static constexpr int kTableLevels = 32;  // of one register
    static constexpr int kTables = K <= 5 ? 1 : 1 << (K - 5);
    static __m512bh bh(__m512i v) { return reinterpret_cast<__m512bh>(v); }
    __m512i pick(__m512i index, int t) const { return _mm512_permutex2var_epi16(table_[t], index, table_[t + 1]); }

    __m512i table_[kTables];
};

}  // namespace
}  // namespace kbitq::KBITQ_ISA
