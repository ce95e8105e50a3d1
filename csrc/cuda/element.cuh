// Source and destination elements on the device: one table of their types, and loads and stores of several at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "format/block.h"
#include "format/dtype.h"

namespace kbitq {

// The table of element types: what a kernel asks about one. Widening is exact; rounding is to nearest, ties to even.
template <typename T>
struct Element;

template <>
struct Element<float> {
    using Type = float;
    static constexpr DType kDType = DType::f32;
    static constexpr int kMantissaBits = 23, kExponentBias = 127;
    static __device__ __forceinline__ float widen(float v) { return v; }
    static __device__ __forceinline__ float round(float v) { return v; }
};

template <>
struct Element<__nv_bfloat16> {
    using Type = __nv_bfloat16;
    static constexpr DType kDType = DType::bf16;
    static constexpr int kMantissaBits = 7, kExponentBias = 127;
    static __device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
    static __device__ __forceinline__ __nv_bfloat16 round(float v) { return __float2bfloat16_rn(v); }
    static __device__ __forceinline__ float widen_bits(uint32_t bits) { return __uint_as_float(bits << 16); }
    // Two elements of a word, the first in its low half.
    static __device__ __forceinline__ float2 widen_pair(uint32_t word) {
        return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
    }
    static __device__ __forceinline__ uint32_t round_pair(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
};

template <>
struct Element<__half> {
    using Type = __half;
    static constexpr DType kDType = DType::f16;
    static constexpr int kMantissaBits = 10, kExponentBias = 15;
    static __device__ __forceinline__ float widen(__half v) { return __half2float(v); }
    static __device__ __forceinline__ __half round(float v) { return __float2half_rn(v); }
    static __device__ __forceinline__ float widen_bits(uint32_t bits) { return widen(__ushort_as_half(bits)); }
    static __device__ __forceinline__ float2 widen_pair(uint32_t word) {
        return {widen_bits(word & 0xFFFFu), widen_bits(word >> 16)};
    }
    static __device__ __forceinline__ uint32_t round_pair(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
};

// Calls body(Element<T>) for the type of a DType.
template <typename Body>
inline void with_dtype(DType dtype, Body&& body) {
    switch (dtype) {
        case DType::f32: return body(Element<float>{});
        case DType::bf16: return body(Element<__nv_bfloat16>{});
        default: return body(Element<__half>{});
    }
}

// The same for activations, which have 16 bits: float16, else bfloat16.
template <typename Body>
inline void with_dtype_of_16_bits(DType dtype, Body&& body) {
    if (dtype == DType::f16) return body(Element<__half>{});
    body(Element<__nv_bfloat16>{});
}

// One element, whatever its address.
template <typename T>
__device__ __forceinline__ float load_element(const void* p, int64_t i) {
    if constexpr (sizeof(T) == 4) {
        return static_cast<const float*>(p)[i];
    } else {
        return Element<T>::widen_bits(static_cast<const uint16_t*>(p)[i]);
    }
}

__device__ __forceinline__ float load_element(const void* p, DType dtype, int64_t i) {
    if (dtype == DType::f32) return load_element<float>(p, i);
    return dtype == DType::bf16 ? load_element<__nv_bfloat16>(p, i) : load_element<__half>(p, i);
}

// The elements of 16 bytes, widened.
template <typename T>
__device__ __forceinline__ void widen_chunk(const uint4& chunk, float* v) {
    const uint32_t word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            v[i] = __uint_as_float(word[i]);
        } else {
            const float2 pair = Element<T>::widen_pair(word[i]);
            v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
        }
    }
}

// A block's values where its row may end within it: load(i) for i < length, zeros after that.
template <typename Load>
__device__ __forceinline__ void load_tail(float (&v)[kBlock], int length, const Load& load) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = i < length ? load(i) : 0.0f;
}

// Eight elements of 16 bits from column `col` of a row on, one at a time, zeros from column `cols` on. `row`: where
// column `col` of it lies.
__device__ __forceinline__ uint4 load_eight_in_row(const void* row, int64_t col, int64_t cols) {
    uint16_t e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = col + i < cols ? static_cast<const uint16_t*>(row)[i] : uint16_t{0};
    return make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
}

// Eight neighbours, 16-byte aligned.
template <typename T>
__device__ __forceinline__ void store_eight(T* p, const float (&v)[8]) {
    if constexpr (sizeof(T) == 4) {
        reinterpret_cast<float4*>(p)[0] = {v[0], v[1], v[2], v[3]};
        reinterpret_cast<float4*>(p)[1] = {v[4], v[5], v[6], v[7]};
    } else {
        using E = Element<T>;
        *reinterpret_cast<uint4*>(p) = {E::round_pair(v[0], v[1]), E::round_pair(v[2], v[3]), E::round_pair(v[4], v[5]),
                                        E::round_pair(v[6], v[7])};
    }
}

// Eight neighbours of which the row has `left`; `aligned`: eight may be stored at once.
template <typename T>
__device__ __forceinline__ void store_eight_in_row(T* p, const float (&v)[8], int64_t left, bool aligned) {
    if (aligned && left >= 8) return store_eight(p, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < left) p[i] = Element<T>::round(v[i]);
    }
}

// block / blocks in a row, by a 32-bit division where that is enough: a 64-bit one costs some 70 instructions.
__device__ __forceinline__ int64_t block_row(int64_t block, int64_t blocks_in_row) {
    if (((block | blocks_in_row) >> 32) == 0)
        return static_cast<uint32_t>(block) / static_cast<uint32_t>(blocks_in_row);
    return block / blocks_in_row;
}

}  // namespace kbitq
