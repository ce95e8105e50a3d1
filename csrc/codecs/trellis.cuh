// The codec `trellis`, as dequantize and stats see it: two more planes from rotations of the path (format/trellis.h),
// then as `planes` with two bits more. Each of the four lanes of a block has the whole path, so none asks another.
#pragma once

#include "codecs/planes.cuh"
#include "format/trellis.h"

namespace kbitq {
namespace {

template <int K, int ScaleBlocks>
struct Trellis {
    static constexpr int kWords = K;
    static constexpr int kIndexBits = K + kTrellisExtraBits;
    static constexpr int kScaleBlocks = ScaleBlocks;
    static constexpr bool kFloatScales = false;
    using Indices = EightIndices<kIndexBits>;

    static __device__ __forceinline__ Indices indices(const uint32_t (&w)[K], int t) {
        uint32_t plane[kIndexBits];
        expand_path<K>(plane, w);
        return indices_of_planes<kIndexBits>(plane, byte_of_two(t));
    }
};

}  // namespace
}  // namespace kbitq
