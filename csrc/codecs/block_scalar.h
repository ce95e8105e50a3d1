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

// The `mse` rule: of `count` candidates, the n-th of which is byte_of(n), that of least error. They ascend, so a strict
// < keeps the smallest byte on a tie.
template <typename ByteOf, typename ErrorOf>
int least_error_byte(int count, ByteOf&& byte_of, ErrorOf&& error_of) {
    int best = 0;
    float least = __builtin_inff();
    for (int n = 0; n < count; ++n) {
        const int byte = byte_of(n);
        const float error = error_of(byte);
        if (error < least) {
            least = error;
            best = byte;
        }
    }
    return best;
}

}  // namespace
}  // namespace kbitq
