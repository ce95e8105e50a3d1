// The codec `trellis` for bfloat16 products: `planes` with two bits more, which rotations of the path give.
#pragma once

#include "codecs/planes_bf16.h"
#include "codecs/trellis_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <int K, int ScaleBlocks>
class Bf16Decoder<Trellis<K, ScaleBlocks>> {
  public:
    explicit Bf16Decoder(const float* codebook) : planes_(codebook) {}

    [[gnu::always_inline]] inline __m512bh decode_block(const uint32_t* words) const {
        uint32_t plane[K + kTrellisExtraBits];
        expand_path<K>(plane, words);
        return planes_.decode_block(plane);
    }

  private:
    Bf16Decoder<Planes<K + kTrellisExtraBits>> planes_;
};

}  // namespace
}  // namespace kbitq::KBITQ_ISA
