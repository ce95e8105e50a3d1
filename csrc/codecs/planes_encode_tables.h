// The codec `planes` on the CPU: the tables of one quantize call.
#pragma once

#include "codecs/encoding.h"
#include "format/codebook.h"

namespace kbitq {

constexpr int kTablePadding = 16;  // lanes of the widest vector: small tables are loaded whole

struct PlanesTables : EncodeTables {
    alignas(64) float levels[kMaxLevels + kTablePadding];
    alignas(64) float mid[kMaxLevels + kTablePadding];  // 2^K - 1 thresholds, then +inf
    // mid again in the order of the binary search, for tables of a vector's width: tree[d] holds the 2^d thresholds
    // that the compare at depth d may need, one for each index prefix of d bits.
    alignas(64) float tree[kMaxBits][kMaxLevels / 2 + kTablePadding];
    int zero;  // index of an exact zero
};

static inline void fill_tables(PlanesTables& t, const float* levels, int k) {
    const int n = 1 << k;
    for (int i = 0; i < kMaxLevels + kTablePadding; ++i) {
        t.levels[i] = i < n ? levels[i] : 0.0f;
        t.mid[i] = i + 1 < n ? level_midpoint(levels[i], levels[i + 1]) : __builtin_inff();
    }
    for (int depth = 0; depth < k; ++depth) {
        for (int prefix = 0; prefix < kMaxLevels / 2 + kTablePadding; ++prefix) {
            const int step = 1 << (k - depth);
            t.tree[depth][prefix] = prefix < (1 << depth) ? t.mid[prefix * step + step / 2 - 1] : 0.0f;
        }
    }
    t.zero = zero_index(t.mid, n);
}

}  // namespace kbitq
