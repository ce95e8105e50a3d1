// The codec `trellis`, vector: two more planes from rotations of the path (format/trellis.h), then as `planes` with two
// bits more.
#pragma once

#include "codecs/planes_simd.h"
#include "codecs/trellis_encode_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <int K>
class TrellisDecoder {
  public:
    explicit TrellisDecoder(const float* codebook) : planes_(codebook) {}

    template <Order kOrder>
    [[gnu::always_inline]] inline void decode_block(F (&level)[kVectors], const uint32_t* words) const {
        uint32_t plane[K + kTrellisExtraBits];
        expand_path<K>(plane, words);
        planes_.template decode_block<kOrder>(level, plane);
    }

  private:
    PlanesDecoder<K + kTrellisExtraBits> planes_;
};

template <int K, int ScaleBlocks>
struct Trellis {
    static constexpr int kWords = K;  // of a block
    static constexpr int kScaleBlocks = ScaleBlocks;
    static constexpr bool kTogether = true;
    using Decoder = TrellisDecoder<K>;
    using Encoder = TrellisEncoder<K, ScaleBlocks>;
};

}  // namespace
}  // namespace kbitq::KBITQ_ISA
