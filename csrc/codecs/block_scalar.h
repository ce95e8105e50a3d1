// What the scalar kernels of all codecs take and give: as codecs/block_simd.h says, one element at a time, with K at
// run time.
#pragma once

#include "codecs/encoding.h"
#include "format/block.h"

namespace kbitq {
namespace {

// A block to encode.
struct SourceBlock {
    float v[kBlock];       // W * 2^-x, zeros past the row's end
    float weight[kBlock];  // of the squared errors, zeros past the row's end
    int length;            // elements before the row's end
    float most;            // max |v|
};

// The 32 terms of a block added as a warp would: i+16 to i, then i+8, i+4, i+2, i+1.
template <typename T>
T tree_sum(T (&term)[kBlock]) {
    for (int half = kBlock / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) term[i] += term[i + half];
    }
    return term[0];
}

}  // namespace
}  // namespace kbitq
