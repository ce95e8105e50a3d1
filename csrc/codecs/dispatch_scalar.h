// From the codec and K of a matrix to the object that has its scalar kernels: run(codec).
#pragma once

#include "codecs/packed_matrix.h"
#include "codecs/planes_scalar.h"
#include "codecs/trellis_scalar.h"

namespace kbitq {
namespace {

template <typename Matrix, typename Run>
void with_codec(const Matrix& packed, Run&& run) {
    switch (packed.codec) {
        case Codec::planes: return run(PlanesScalar(packed.k));
        case Codec::trellis: return run(TrellisScalar(packed.k));
    }
}

}  // namespace
}  // namespace kbitq
