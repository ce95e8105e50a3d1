// From the codec of a matrix to its tables for one quantize call: run(tables). A new codec adds a case here, in
// dispatch_scalar.h and in dispatch_simd.h.
#pragma once

#include "codecs/packed_matrix.h"
#include "codecs/planes_encode_tables.h"
#include "codecs/trellis_encode_tables.h"

namespace kbitq {

template <typename Run>
static inline void with_encode_tables(const PackedOutput& packed, const float* levels, const EncodeTables& common,
                                      Run&& run) {
    switch (packed.codec) {
        case Codec::planes: {
            PlanesTables tables;
            static_cast<EncodeTables&>(tables) = common;
            fill_tables(tables, levels, packed.k);
            return run(tables);
        }
        case Codec::trellis: {
            TrellisTables tables;
            static_cast<EncodeTables&>(tables) = common;
            fill_tables(tables, levels, packed.k, packed.scale_blocks);
            return run(tables);
        }
    }
}

}  // namespace kbitq
