// The scale bytes of tiles, four to a word: [ (g+8, odd block) | (g+8, even block) | (g, odd) | (g, even) ] for the
// rows g and g + 8 of a lane and two neighbouring blocks.
//
// All of them use one property of E4M4: a byte at the place of a float type's exponent and mantissa is the scale times
// a power of two that depends on the biases alone, subnormals included. So a scale costs a shift and a mask, and the
// power of two goes wherever it is free.
#pragma once

#include "cuda/element.cuh"
#include "cuda/mma.cuh"
#include "format/scale_e4m4.h"

namespace kbitq::tiled {

template <typename T>
struct PlacedScale {
    static constexpr int kShift = Element<T>::kMantissaBits - kScaleMantissaBits;
    static constexpr int kExponent = kScaleBias - Element<T>::kExponentBias;  // placed byte = scale * 2^kExponent
    // Levels of weights that are scaled before they are multiplied are normalised to 2^kLift: the smallest level times
    // the smallest placed byte is then a normal number of T, or as good as one.
    static constexpr int kLift = sizeof(T) == 2 && Element<T>::kDType == DType::f16 ? 14 : -kExponent;
};

// The scales of rows g and g + 8 of a lane.
struct RowScales {
    float low, high;
};

// The scale in byte i of a word.
__device__ __forceinline__ float scale_of_byte(uint32_t word, int i) {
    const int shift = PlacedScale<float>::kShift - 8 * i;
    const uint32_t placed = (shift >= 0 ? word << shift : word >> -shift) & (0xFFu << PlacedScale<float>::kShift);
    return scale_of_placed(placed);
}

// The placed bytes of rows g (low half) and g + 8 (high half) for the even or the odd block of a word.
template <typename T>
__device__ __forceinline__ uint32_t placed_pair(uint32_t word, bool odd) {
    constexpr int kShift = PlacedScale<T>::kShift;
    return (odd ? word >> (8 - kShift) : word << kShift) & (0x00FF00FFu << kShift);
}

// A decoded subtile times its placed bytes.
template <typename T>
__device__ __forceinline__ void scale_weights(uint32_t word, uint32_t (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t scales = placed_pair<T>(word, i);
#pragma unroll
        for (int r = 0; r < 8; ++r)
            a[8 * i + r] = Pair<T>::multiply(a[8 * i + r], r % 2 ? high_twice(scales) : low_twice(scales));
    }
}

}  // namespace kbitq::tiled
