// THE format: a codebook of 2^K ascending levels and the thresholds between them (docs/format.md section 3).
#pragma once

#include "format/block.h"

namespace kbitq {

// The threshold between neighbours; a value above it takes the upper level. One rounding each for the sum and the half.
KBITQ_HD float level_midpoint(float lower, float upper) { return 0.5f * (lower + upper); }

// index = number of j with v > mid[j] * s, by binary search: K compares.
// Each step settles one bit of the index, from the most significant down, so the compares are the bit planes.
template <int K>
KBITQ_HD int nearest_index(const float* mid, float v, float s) {
    int index = 0;
    for (int bit = K - 1; bit >= 0; --bit) {
        if (v > mid[index + (1 << bit) - 1] * s) index |= 1 << bit;
    }
    return index;
}

// The candidates of the `mse` rule: encode(max |v|) + d for d = first, first + step, ..., kLastCandidate.
constexpr int kLastCandidate = 4;
KBITQ_HD constexpr int first_candidate(int k) { return k == 2 ? -24 : -8; }
KBITQ_HD constexpr int candidate_step(int k) { return k == 2 ? 2 : 1; }
KBITQ_HD constexpr int candidate_count(int k) { return (kLastCandidate - first_candidate(k)) / candidate_step(k) + 1; }

}  // namespace kbitq
