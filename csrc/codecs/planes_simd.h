// What the vector kernels of all ops share: one block in registers. Written once in the vocabulary of cpu/simd_*.h;
// each instruction set compiles its own copy in its own namespace (KBITQ_ISA).
#pragma once

#include "cpu/element.h"
#include "format/scale_e4m4.h"
#include "ops/codec/kernels.h"

namespace kbitq::KBITQ_ISA {
namespace {

// Elements of a block as float32, zeros past a row's end.
inline void load_block(F (&v)[kVectors], const void* p, DType dtype, int64_t first, int length) {
    if (length < kBlock) {
        alignas(64) float tail[kBlock] = {};
        for (int i = 0; i < length; ++i) tail[i] = read_element(p, dtype, first + i);
        for (int q = 0; q < kVectors; ++q) v[q] = load(tail + q * kLanes);
        return;
    }
    if (dtype == DType::f32) {
        for (int q = 0; q < kVectors; ++q) v[q] = load(static_cast<const float*>(p) + first + q * kLanes);
    } else {
        const uint16_t* h = static_cast<const uint16_t*>(p) + first;
        if (dtype == DType::bf16) {
            for (int q = 0; q < kVectors; ++q) v[q] = load_bf16(h + q * kLanes);
        } else {
            for (int q = 0; q < kVectors; ++q) v[q] = load_f16(h + q * kLanes);
        }
    }
}

// A block of an output in its type; kStream: past the caches (cpu/simd_*.h).
template <bool kStream>
inline void store_block(const F (&v)[kVectors], void* p, DType dtype, int64_t first, int length) {
    if (length < kBlock) {
        alignas(64) float tail[kBlock];
        for (int q = 0; q < kVectors; ++q) store(tail + q * kLanes, v[q]);
        for (int i = 0; i < length; ++i) write_element(p, dtype, first + i, tail[i]);
        return;
    }
    for (int q = 0; q < kVectors; ++q) {
        const int64_t at = first + q * kLanes;
        if (dtype == DType::f32) {
            float* to = static_cast<float*>(p) + at;
            if constexpr (kStream)
                stream(to, v[q]);
            else
                store(to, v[q]);
        } else {
            uint16_t* to = static_cast<uint16_t*>(p) + at;
            const auto half = dtype == DType::bf16 ? to_bf16(v[q]) : to_f16(v[q]);
            if constexpr (kStream)
                stream_half(to, half);
            else
                store_half(to, half);
        }
    }
}

// A codebook padded to a vector's width.
template <int K>
struct Levels {
    alignas(64) float value[(1 << K) < kTablePadding ? kTablePadding : (1 << K)];
    explicit Levels(const float* codebook) {
        for (int i = 0; i < (1 << K); ++i) value[i] = codebook[i];
        for (int i = 1 << K; i < kTablePadding; ++i) value[i] = 0.0f;
    }
};

// W' of a block: K plane words to indices, indices to levels, times the scale.
template <int K>
inline void decode_block(F (&w)[kVectors], const uint32_t* words, const Levels<K>& levels, float s) {
    I index[kVectors];
    unpack<K>(index, words);
    for (int q = 0; q < kVectors; ++q) w[q] = mul(lookup<(1 << K)>(levels.value, index[q]), splat(s));
}

inline float block_scale(const PackedMatrix& m, const float* scales, int64_t block) {
    return m.float_scales ? m.float_scales[block] : scales[m.scales[block]];
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
