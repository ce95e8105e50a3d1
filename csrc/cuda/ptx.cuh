// One function per PTX instruction that C++ has no word for.
#pragma once

#include <cstdint>

namespace kbitq {
namespace {

// 1 / v within one unit in the last place, for v whose reciprocal is a normal number. Only where the result is not part
// of the format.
__device__ __forceinline__ float approximate_reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// a * b + c in one rounding, then clamped into [0, 1]; NaN becomes 0. Only where the result is not part of the format.
__device__ __forceinline__ float saturating_fma(float a, float b, float c) {
    float r;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// difference = value - level, if magnitude > threshold; else left as it is. As a predicated subtraction, which runs on
// the floating-point pipe; a select would take the integer pipe, which the comparison needs already.
__device__ __forceinline__ void subtract_if_above(float& difference, float magnitude, float threshold, float value,
                                                  float level) {
    asm("{ .reg .pred above;\n\t"
        "setp.gt.f32 above, %1, %2;\n\t"
        "@above sub.rn.f32 %0, %3, %4; }"
        : "+f"(difference)
        : "f"(magnitude), "f"(threshold), "f"(value), "f"(level));
}

// address += step, if value > threshold.
template <uint32_t step>
__device__ __forceinline__ void advance_if_above(uint32_t& address, float value, float threshold) {
    asm("{ .reg .pred above;\n\t"
        "setp.gt.f32 above, %1, %2;\n\t"
        "@above add.u32 %0, %0, %3; }"
        : "+r"(address)
        : "f"(value), "f"(threshold), "n"(step));
}

// sum += (how many of three ascending thresholds are below value) << shift: the middle one settles the upper bit and
// which of the others settles the lower.
template <int shift>
__device__ __forceinline__ void add_two_bits(uint32_t& sum, float value, float low, float middle, float high) {
    asm("{ .reg .pred above;\n\t"
        ".reg .f32 next;\n\t"
        "setp.gt.f32 above, %1, %3;\n\t"
        "@above add.u32 %0, %0, %5;\n\t"
        "selp.f32 next, %4, %2, above;\n\t"
        "setp.gt.f32 above, %1, next;\n\t"
        "@above add.u32 %0, %0, %6; }"
        : "+r"(sum)
        : "f"(value), "f"(low), "f"(middle), "f"(high), "n"(2u << shift), "n"(1u << shift));
}

// Keeps v in a register: the compiler may not compute it again where it is used.
__device__ __forceinline__ void keep(float& v) { asm volatile("" : "+f"(v)); }

// A table in shared memory by its 32-bit address, to which an index can be joined by a single logic instruction.
// (Through a pointer, the compiler adds the base of the table to every index.)
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The word at address + offset; the instruction adds them at no cost. The asm is not volatile and clobbers no memory:
// it is for tables that do not change once the barrier after their filling is past, and `address` must come from
// something read after that barrier.
template <uint32_t offset>
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
    uint32_t r;
    asm("ld.shared.b32 %0, [%1+%2];" : "=r"(r) : "r"(address), "n"(offset));
    return r;
}

}  // namespace
}  // namespace kbitq
