// From the codec and K of a matrix to the struct that has its kernels, and what the ops make of that struct.
#pragma once

#include "codecs/packed_matrix.h"
#include "codecs/planes_simd.h"
#include "codecs/trellis_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

// Calls run(C()): with_codec(packed, [&](auto codec) { kernel<decltype(codec)>(...); }).
template <typename Matrix, typename Run>
inline void with_codec(const Matrix& packed, Run&& run) {
    switch (packed.codec) {
        case Codec::planes: return with_bits(packed.k, [&](auto k) { run(Planes<k>()); });
        case Codec::trellis:
            return with_trellis_bits(packed.k, [&](auto k) {
                packed.scale_blocks == 1 ? run(Trellis<k, 1>()) : run(Trellis<k, kWideScaleBlocks>());
            });
    }
}

// W' of a block, rounded as the format says: levels times the scale, one multiplication each.
template <typename Decoder>
inline void decode_weights(F (&w)[kVectors], const Decoder& decoder, const uint32_t* words, float scale) {
    decoder.template decode_block<Order::row>(w, words);
    for (int q = 0; q < kVectors; ++q) w[q] = mul(w[q], splat(scale));
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
