// A block of any element type, to and from registers. Written once in the vocabulary of cpu/simd_*.h; each instruction
// set compiles its own copy in its own namespace (KBITQ_ISA).
//
// What lies between a kernel and its registers, here and in the codecs, is inlined always: each codec adds callers, and
// with enough of them the compiler makes calls that pass blocks through memory (up to 1.8 times the time). The kernels
// themselves (*_with) are never inlined, so that each has the registers to itself.
#pragma once

#include "cpu/element.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <DType D>
inline F load_lanes(const Stored<D>* p) {
    if constexpr (D == DType::f32) return load(p);
    if constexpr (D == DType::bf16) return load_bf16(p);
    if constexpr (D == DType::f16) return load_f16(p);
}

// kStream: past the caches (cpu/simd_*.h).
template <DType D, bool kStream>
inline void store_lanes(Stored<D>* p, F v) {
    const auto put = [p](auto rounded) {
        if constexpr (kStream)
            stream(p, rounded);
        else
            store(p, rounded);
    };
    if constexpr (D == DType::f32) put(v);
    if constexpr (D == DType::bf16) put(to_bf16(v));
    if constexpr (D == DType::f16) put(to_f16(v));
}

// In a loop that only the last block of a row runs: keeps it from becoming vector code or a call of memcpy, which would
// cost all blocks registers.
inline void one_by_one() { asm volatile(""); }

// A whole block to read: `from`, or its `length` elements with zeros behind them in `copy`. A row's end is read so.
template <typename T>
inline const T* whole_block(T (&copy)[kBlock], const T* from, int length) {
    if (length == kBlock) return from;
    for (T& element : copy) element = T{};
    for (int i = 0; i < length; ++i, one_by_one()) copy[i] = from[i];
    return copy;
}

// Elements first .. first + length - 1 as float32, zeros behind them.
[[gnu::always_inline]] inline void load_block(F (&v)[kVectors], const void* p, DType dtype, int64_t first, int length) {
    with_element(dtype, [&](auto d) __attribute__((always_inline)) {
        Stored<d> tail[kBlock];
        const Stored<d>* from = whole_block(tail, static_cast<const Stored<d>*>(p) + first, length);
        for (int q = 0; q < kVectors; ++q) v[q] = load_lanes<d>(from + q * kLanes);
    });
}

// The first `length` elements of a block in the output's type.
template <bool kStream>
[[gnu::always_inline]] inline void store_block(const F (&v)[kVectors], void* p, DType dtype, int64_t first,
                                               int length) {
    with_element(dtype, [&](auto d) __attribute__((always_inline)) {
        Stored<d>* const to = static_cast<Stored<d>*>(p) + first;
        if (length == kBlock) {
            for (int q = 0; q < kVectors; ++q) store_lanes<d, kStream>(to + q * kLanes, v[q]);
        } else {
            Stored<d> tail[kBlock];
            for (int q = 0; q < kVectors; ++q) store_lanes<d, false>(tail + q * kLanes, v[q]);
            for (int i = 0; i < length; ++i, one_by_one()) to[i] = tail[i];
        }
    });
}

// All ones, then all zeros: from element kBlock - length on, they are the bits to keep of a block of that length.
struct TailBits {
    uint32_t bits[2 * kBlock];
    constexpr TailBits() : bits() {
        for (int i = 0; i < kBlock; ++i) bits[i] = ~0u;
    }
};
constexpr TailBits kTailBits;

// Zeros behind the first `length` elements.
inline void clear_tail(F (&v)[kVectors], int length) {
    if (length == kBlock) return;
    const uint32_t* keep = kTailBits.bits + kBlock - length;
    for (int q = 0; q < kVectors; ++q) v[q] = and_bits(v[q], keep + q * kLanes);
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
