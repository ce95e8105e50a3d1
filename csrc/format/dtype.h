// THE element types of source and destination tensors: one table. format/half.h has the ways to and from float32.
#pragma once

#include <cstdint>
#include <type_traits>

namespace kbitq {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

// kInfinity: the bits of the type's infinity; larger magnitudes are NaN. kOverflow: the bits of the least float32 that
// rounds to infinity.
template <DType>
struct ElementType;
template <>
struct ElementType<DType::f32> {
    using Stored = float;
    static constexpr const char* kName = "float32";
    static constexpr uint32_t kInfinity = 0x7F800000u, kOverflow = 0x7F800000u;
};
template <>
struct ElementType<DType::bf16> {
    using Stored = uint16_t;
    static constexpr const char* kName = "bfloat16";
    static constexpr uint32_t kInfinity = 0x7F80u, kOverflow = 0x7F7F8000u;
};
template <>
struct ElementType<DType::f16> {
    using Stored = uint16_t;
    static constexpr const char* kName = "float16";
    static constexpr uint32_t kInfinity = 0x7C00u, kOverflow = 0x477FF000u;  // 65520
};

template <DType D>
using Stored = typename ElementType<D>::Stored;

// Calls body with the DType as a compile-time constant: with_element(dtype, [&](auto d) { kernel<d>(...); }).
template <typename Body>
[[gnu::always_inline]] static inline constexpr decltype(auto) with_element(DType dtype, Body&& body) {
    if (dtype == DType::f32) return body(std::integral_constant<DType, DType::f32>{});
    if (dtype == DType::bf16) return body(std::integral_constant<DType, DType::bf16>{});
    return body(std::integral_constant<DType, DType::f16>{});
}

static inline constexpr int dtype_size(DType dtype) {
    return with_element(dtype, [](auto d) { return static_cast<int>(sizeof(Stored<d>)); });
}

}  // namespace kbitq
