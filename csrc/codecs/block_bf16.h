// A block of levels as bfloat16, for products with AVX512_BF16 (vdpbf16ps): one vector of 32 in the order of the row.
// Levels are rounded to bfloat16 (what their scale multiplies is exact), as the GPU's kernels do.
#pragma once

#include <immintrin.h>

#include "codecs/block_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

// Of any codec C: float32 levels, rounded. A codec that can do without them says so in a specialisation.
template <typename C>
class Bf16Decoder {
  public:
    explicit Bf16Decoder(const float* codebook) : decoder_(codebook) {}

    [[gnu::always_inline]] inline __m512bh decode_block(const uint32_t* words) const {
        F level[kVectors];
        decoder_.template decode_block<Order::row>(level, words);
        return _mm512_cvtne2ps_pbh(level[1], level[0]);
    }

  private:
    typename C::Decoder decoder_;
};

}  // namespace
}  // namespace kbitq::KBITQ_ISA
