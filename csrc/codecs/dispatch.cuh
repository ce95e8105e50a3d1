// From the codec and K of a matrix to the struct that dequantize and stats are templates on: run(Codec()). A new codec
// adds a case.
#pragma once

#include "codecs/packed_matrix.h"
#include "codecs/planes.cuh"
#include "codecs/trellis.cuh"

namespace kbitq {
namespace {

template <typename Run>
void with_codec(const PackedMatrix& packed, Run&& run) {
    switch (packed.codec) {
        case Codec::planes: return with_bits(packed.k, [&](auto k) { run(Planes<k>()); });
        case Codec::trellis:
            return with_trellis_bits(packed.k, [&](auto k) {
                packed.scale_blocks == 1 ? run(Trellis<k, 1>()) : run(Trellis<k, kWideScaleBlocks>());
            });
    }
}

}  // namespace
}  // namespace kbitq
