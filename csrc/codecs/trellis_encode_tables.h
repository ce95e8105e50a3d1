// The codec `trellis` on the CPU: the tables of one quantize call.
#pragma once

#include "codecs/encoding.h"
#include "format/trellis.h"

namespace kbitq {

struct TrellisTables : EncodeTables {
    int scale_blocks;
    float levels[trellis_levels(kTrellisMaxBits)];
};

static inline void fill_tables(TrellisTables& t, const float* levels, int k, int scale_blocks) {
    t.scale_blocks = scale_blocks;
    for (int i = 0; i < trellis_levels(kTrellisMaxBits); ++i) t.levels[i] = i < trellis_levels(k) ? levels[i] : 0.0f;
}

}  // namespace kbitq
