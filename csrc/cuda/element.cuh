// Source and destination elements on the device: 16 bytes widened to float32 (exact), and eight float32 rounded once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "format/half.h"

namespace kbitq {
namespace {

// The element type of a DType.
template <DType>
struct ElementOf;
template <>
struct ElementOf<DType::f32> {
    using type = float;
};
template <>
struct ElementOf<DType::bf16> {
    using type = __nv_bfloat16;
};
template <>
struct ElementOf<DType::f16> {
    using type = __half;
};

// Calls body with the DType as a compile-time constant.
template <typename Body>
inline void with_dtype(DType dtype, Body&& body) {
    switch (dtype) {
        case DType::f32: return body(std::integral_constant<DType, DType::f32>{});
        case DType::bf16: return body(std::integral_constant<DType, DType::bf16>{});
        default: return body(std::integral_constant<DType, DType::f16>{});
    }
}

__device__ __forceinline__ float widen_f16(uint32_t bits) { return __half2float(__ushort_as_half(bits)); }

// Two 16-bit elements of a word.
template <DType D>
__device__ __forceinline__ float2 widen_pair(uint32_t word) {
    if constexpr (D == DType::bf16) return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
    return {widen_f16(word & 0xFFFFu), widen_f16(word >> 16)};
}

// One element, whatever its address.
template <DType D>
__device__ __forceinline__ float load_element(const void* p, int64_t i) {
    if constexpr (D == DType::f32) return static_cast<const float*>(p)[i];
    const uint32_t bits = static_cast<const uint16_t*>(p)[i];
    return D == DType::bf16 ? __uint_as_float(bits << 16) : widen_f16(bits);
}

__device__ __forceinline__ float load_element(const void* p, DType dtype, int64_t i) {
    if (dtype == DType::f32) return load_element<DType::f32>(p, i);
    return dtype == DType::bf16 ? load_element<DType::bf16>(p, i) : load_element<DType::f16>(p, i);
}

__device__ __forceinline__ void store_element(float* p, float v) { *p = v; }
__device__ __forceinline__ void store_element(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }
__device__ __forceinline__ void store_element(__half* p, float v) { *p = __float2half_rn(v); }

__device__ __forceinline__ uint32_t round_pair(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t round_pair(float low, float high, __half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Eight neighbours, 16-byte aligned.
template <typename T>
__device__ __forceinline__ void store_eight(T* p, const float (&v)[8]) {
    *reinterpret_cast<uint4*>(p) = {round_pair(v[0], v[1], T{}), round_pair(v[2], v[3], T{}),
                                    round_pair(v[4], v[5], T{}), round_pair(v[6], v[7], T{})};
}
__device__ __forceinline__ void store_eight(float* p, const float (&v)[8]) {
    reinterpret_cast<float4*>(p)[0] = {v[0], v[1], v[2], v[3]};
    reinterpret_cast<float4*>(p)[1] = {v[4], v[5], v[6], v[7]};
}

// block / blocks in a row, by a 32-bit division where that is enough: a 64-bit one costs some 70 instructions.
__device__ __forceinline__ int64_t block_row(int64_t block, int64_t blocks_in_row) {
    if (((block | blocks_in_row) >> 32) == 0)
        return static_cast<uint32_t>(block) / static_cast<uint32_t>(blocks_in_row);
    return block / blocks_in_row;
}

// The value of a block's scale: its E4M4 byte read as a float's exponent and mantissa, whose subnormals are the
// format's too (exact, no branch).
__device__ __forceinline__ float decode_scale(uint32_t byte) {
    return bits_float(byte << (23 - kScaleMantissaBits)) * exp2_int(127 - kScaleBias);
}

}  // namespace
}  // namespace kbitq
