// The order in which a block's terms are added (format.md section 3): i+16 to i, then i+8, i+4, i+2, i+1, as a warp's
// shuffle-down would. By one thread, depth first, so that few terms are alive at a time.
#pragma once

#include "format/block.h"

namespace kbitq {
namespace {

// term(i) gives the i-th of the 32 terms and is called once for each.
template <int Step = 1, typename Term>
__device__ __forceinline__ auto tree_sum(const Term& term, int i = 0) {
    if constexpr (Step == kBlock) {
        return term(i);
    } else {
        const auto left = tree_sum<2 * Step>(term, i);
        return left + tree_sum<2 * Step>(term, i + Step);
    }
}

}  // namespace
}  // namespace kbitq
