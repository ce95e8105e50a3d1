// THE format: the E4M4 scale byte and the power of two per tensor (docs/format.md section 2).
//
//   byte   e e e e m m m m        e > 0:  2^(e-11) * (1 + m/16)        e = 0:  2^-10 * m/16
//
// Read as an integer the byte is monotone in its value, and the carry of a rounded mantissa into the exponent is a
// plain +1.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "format/block.h"
#include "format/dtype.h"

namespace kbitq {

constexpr int kScaleBias = 11;
constexpr int kScaleMantissaBits = 4;
constexpr int kScaleBytes = 256;
constexpr float kScaleMax = 31.0f;      // byte 0xFF
constexpr float kScaleStep = 0x1p-14f;  // between subnormal values: 2^(1 - kScaleBias - kScaleMantissaBits)

KBITQ_HD uint32_t float_bits(float v) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(v);
#else
    uint32_t b;
    std::memcpy(&b, &v, 4);
    return b;
#endif
}

KBITQ_HD float bits_float(uint32_t b) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(b);
#else
    float v;
    std::memcpy(&v, &b, 4);
    return v;
#endif
}

// 2^x for -126 <= x <= 127.
KBITQ_HD float exp2_int(int x) { return bits_float(static_cast<uint32_t>(127 + x) << 23); }

// The value of a scale byte that lies at the place of a float's exponent and mantissa. Its subnormals are the float's,
// so there is no branch; exact. For GPUs: most CPUs take a hundred cycles for a subnormal.
KBITQ_HD float scale_of_placed(uint32_t placed) { return bits_float(placed) * exp2_int(127 - kScaleBias); }

// The value of a scale byte; exact.
KBITQ_HD float decode_e4m4(uint32_t byte) {
    const uint32_t placed = byte << (23 - kScaleMantissaBits);
#if defined(__CUDA_ARCH__)
    return scale_of_placed(placed);
#else
    if (byte < 1u << kScaleMantissaBits) return static_cast<float>(byte) * kScaleStep;
    return bits_float(placed + (static_cast<uint32_t>(127 - kScaleBias) << 23));
#endif
}

// The byte nearest to v >= 0, a tie to the even byte, saturating at 0xFF.
KBITQ_HD uint32_t encode_e4m4(float v) {
    if (!(v < kScaleMax)) return kScaleBytes - 1;
    if (v < kScaleStep * (1 << kScaleMantissaBits)) {
        // Subnormal. Adding 2^23 rounds to an integer, ties to even; 16 is the first normal byte.
        const float steps = v * (1.0f / kScaleStep) + 0x1p23f;
        return float_bits(steps) & 0x1Fu;
    }
    const int drop = 23 - kScaleMantissaBits;
    uint32_t bits = float_bits(v) - (static_cast<uint32_t>(127 - kScaleBias) << 23);
    bits += (1u << (drop - 1)) - 1 + ((bits >> drop) & 1u);
    const uint32_t byte = bits >> drop;
    return byte < kScaleBytes ? byte : kScaleBytes - 1;
}

// The exponent x of the tensor's power of two, from its largest magnitude: 15.5 < amax * 2^-x <= 31 (x >= -100).
KBITQ_HD int tensor_exponent(float amax) {
    if (!(amax > 0.0f)) return 0;
    // amax = m * 2^e with 1/2 <= m < 1, read from the bits (subnormals are scaled up first).
    const bool subnormal = amax < 0x1p-126f;
    const uint32_t bits = float_bits(subnormal ? amax * 0x1p24f : amax);
    const int e = static_cast<int>(bits >> 23) - 126 - (subnormal ? 24 : 0);
    const float m = bits_float((bits & 0x7FFFFFu) | (126u << 23));
    const int x = m <= 31.0f / 32.0f ? e - 5 : e - 4;
    return x < -100 ? -100 : x;
}

// The largest byte whose 2^x * decode(byte), rounded to the source dtype, is finite.
KBITQ_HD uint32_t top_byte(int x, DType dtype) {
    const float limit = bits_float(dtype == DType::f16    ? ElementType<DType::f16>::kOverflow
                                   : dtype == DType::bf16 ? ElementType<DType::bf16>::kOverflow
                                                          : ElementType<DType::f32>::kOverflow);
    uint32_t byte = kScaleBytes - 1;
    while (byte > 0) {
        // x can exceed 127 - 4 only by what the product shows: split so that the factor itself is finite.
        const float value = decode_e4m4(byte) * exp2_int(x);
        if (value < limit) break;
        --byte;
    }
    return byte;
}

}  // namespace kbitq
