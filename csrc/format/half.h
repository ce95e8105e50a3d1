// THE format: widening bf16 and f16 to float32 (exact) and rounding back (nearest, ties to even), with integers only,
// so that no mode of any floating-point unit takes part.
#pragma once

#include <cstdint>

#include "format/block.h"
#include "format/dtype.h"
#include "format/scale_e4m4.h"

namespace kbitq {

KBITQ_HD float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

KBITQ_HD uint16_t float_to_bf16(float v) {
    const uint32_t bits = float_bits(v);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

KBITQ_HD float f16_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t magnitude = h & 0x7FFFu;
    if (magnitude >= 0x7C00u) return bits_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
    if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + (112u << 23)));
    const float value = static_cast<float>(magnitude) * 0x1p-24f;  // subnormal or zero
    return bits_float(sign | float_bits(value));
}

KBITQ_HD uint16_t float_to_f16(float v) {
    const uint32_t bits = float_bits(v);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
    if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {  // below 2^-14: 2^-24 a step; adding 2^-1 puts that step at the last mantissa bit
        const float steps = bits_float(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (float_bits(steps) - 0x3F000000u));
    }
    const uint32_t rebased = magnitude - (112u << 23);
    return static_cast<uint16_t>(sign | ((rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13));
}

// An element of any type, and a float32 as one.
template <DType D>
KBITQ_HD float widen(Stored<D> v) {
    if constexpr (D == DType::f32) return v;
    if constexpr (D == DType::bf16) return bf16_to_float(v);
    if constexpr (D == DType::f16) return f16_to_float(v);
}

// The element that has these bits.
template <DType D>
KBITQ_HD float widen_bits(uint32_t bits) {
    if constexpr (D == DType::f32) {
        return bits_float(bits);
    } else {
        return widen<D>(static_cast<uint16_t>(bits));
    }
}

template <DType D>
KBITQ_HD Stored<D> round_to(float v) {
    if constexpr (D == DType::f32) return v;
    if constexpr (D == DType::bf16) return float_to_bf16(v);
    if constexpr (D == DType::f16) return float_to_f16(v);
}

}  // namespace kbitq
