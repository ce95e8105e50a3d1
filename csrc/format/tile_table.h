// Sizes of a record and of the table that cuda/tile_decode.cuh decodes it by: device and host code plan shared memory
// with them.
#pragma once

#include "format/tile_order.h"

namespace kbitq::matmul {

template <int K, int Copies = 32>
struct TableSize {
    static_assert(Copies == 32 || (K == 5 && Copies == 16));
    static constexpr int kQuad = K == 2;                                  // weights of an entry: 4 or 2
    static constexpr int kEntries = K == 3 ? 0x78 : K == 5 ? 1024 : 256;  // K = 3: an index is [ 0 e1 . . | 0 e0 . . ]
    static constexpr int kRowBytes = K == 5 ? 4 * Copies : 256;
    static constexpr int kBytes = kEntries * kRowBytes;
    static constexpr int kCopyBytes = kQuad ? 8 : 4;  // of an entry, for one lane
};

template <int K>
struct Record {
    static constexpr int kBytes = tile_words(K) * 4;
    static constexpr int kScaleOffset = tile_index_words(K) * 4;
};

}  // namespace kbitq::matmul
