// NF4 in vectors. A vector of bytes has two codes a lane: an index for the even places and, shifted, one for the odd
// ones; a table of 16 levels is one lookup, which does not mind bits above the index.
#pragma once

#include "cpu/block_simd.h"
#include "format/nf4.h"
#include "ops/nf4/nf4_kernels.h"

namespace kbitq::KBITQ_ISA {
namespace {

// Looked up from places 0, 1 and 3 on, sixteen at a time.
struct PaddedBounds {
    float bound[kNf4Levels + 4] = {};
    constexpr PaddedBounds() {
        for (int i = 0; i < kNf4Levels; ++i) bound[i] = kNf4Bounds.bound[i];
    }
};
alignas(64) constexpr PaddedBounds kBounds;

// nf4_code of a vector.
inline I codes_of(F v) {
    I code = or_where(splat_int(0), greater(v, splat(kBounds.bound[7])), 8);
    code = or_where(code, greater(v, lookup<kNf4Levels>(kBounds.bound + 3, code)), 4);
    code = or_where(code, greater(v, lookup<kNf4Levels>(kBounds.bound + 1, code)), 2);
    return or_where(code, greater(v, lookup<kNf4Levels>(kBounds.bound, code)), 1);
}

template <DType D>
void quantize_as(const Nf4QuantizeArgs& a, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
        const Stored<D>* w = static_cast<const Stored<D>*>(a.w) + b * a.block;
        uint8_t* codes = a.codes + b * a.block / 2;
        F most = splat(0.0f);
        for (int i = 0; i < a.block; i += kLanes) most = max(most, magnitude(load_lanes<D>(w + i)));
        const float scale = largest(most);
        a.scales[b] = scale;
        const F inverse = splat(1.0f / (scale > kNf4LeastScale ? scale : kNf4LeastScale));
        for (int i = 0; i < a.block; i += kLanes)
            store_nibbles(codes + i / 2, codes_of(mul(load_lanes<D>(w + i), inverse)));
    }
}

void quantize(const Nf4QuantizeArgs& a, int64_t begin, int64_t end) {
    with_element(a.dtype, [&](auto d) { quantize_as<d>(a, begin, end); });
}

// A block has only 16 values: they are scaled and rounded first, then looked up.
template <DType D>
void dequantize_as(const Nf4DequantizeArgs& a, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
        alignas(64) float value[kNf4Levels];  // of 16-bit types, their bits
        for (int i = 0; i < kNf4Levels; ++i) {
            const float v = kNf4Level[i] * a.scales[b];
            value[i] = D == DType::f32 ? v : bits_float(static_cast<uint32_t>(round_to<D>(v)));
        }
        const uint8_t* codes = a.codes + b * a.block / 2;
        Stored<D>* out = static_cast<Stored<D>*>(a.out) + b * a.block;
        for (int i = 0; i < a.block; i += 2 * kLanes) {
            const I pairs = load_bytes(codes + i / 2);
            const F even = lookup<kNf4Levels>(value, shift_right(pairs, 4)), odd = lookup<kNf4Levels>(value, pairs);
            if constexpr (D == DType::f32) {
                F first, second;
                interleave(even, odd, first, second);
                store(out + i, first);
                store(out + i + kLanes, second);
            } else {
                store(reinterpret_cast<int32_t*>(out + i), or_int(as_bits(even), shift_left(as_bits(odd), 16)));
            }
        }
    }
}

void dequantize(const Nf4DequantizeArgs& a, int64_t begin, int64_t end) {
    with_element(a.dtype, [&](auto d) { dequantize_as<d>(a, begin, end); });
}

#if defined(__FMA__)
// Products of float32: what linear asks of a kind of product.
struct FloatProduct {
    using X = float;
    struct Levels {
        F even, odd;
    };
    static constexpr int kPairs = kLanes;
    static inline Levels decode(const uint8_t* codes) {
        const I pairs = load_bytes(codes);
        return {lookup<kNf4Levels>(kNf4Level, shift_right(pairs, 4)), lookup<kNf4Levels>(kNf4Level, pairs)};
    }
    static inline F add_product(F sum, const Levels& w, const float* x) {
        return fused(w.odd, load(x + kPairs), fused(w.even, load(x), sum));
    }
};

// kRows rows of W by kBatch rows of x.
template <typename Product, int kRows, int kBatch>
void multiply(const Nf4LinearArgs& a, const typename Product::X* x, int64_t row, int64_t batch) {
    const int64_t blocks = a.cols / a.block;
    F sum[kRows][kBatch];
    for (auto& of_row : sum)
        for (F& s : of_row) s = splat(0.0f);
    for (int64_t b = 0; b < blocks; ++b) {
        F part[kRows][kBatch];
        for (auto& of_row : part)
            for (F& p : of_row) p = splat(0.0f);
        for (int64_t i = b * a.block; i < (b + 1) * a.block; i += 2 * Product::kPairs) {
            for (int r = 0; r < kRows; ++r) {
                const uint8_t* const codes = a.codes + ((row + r) * a.cols + i) / 2;
                // The processor would begin again with each row: the next ones are fetched from here.
                _mm_prefetch(reinterpret_cast<const char*>(codes + kRows * a.cols / 2), _MM_HINT_T0);
                const auto levels = Product::decode(codes);
                for (int m = 0; m < kBatch; ++m)
                    part[r][m] = Product::add_product(part[r][m], levels, x + (batch + m) * a.cols + i);
            }
        }
        for (int r = 0; r < kRows; ++r) {
            const F scale = splat(a.scales[(row + r) * blocks + b]);
            for (int m = 0; m < kBatch; ++m) sum[r][m] = fused(part[r][m], scale, sum[r][m]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        const float bias = a.bias ? read_element(a.bias, a.dtype, row + r) : 0.0f;
        for (int m = 0; m < kBatch; ++m)
            write_element(a.y, a.dtype, (batch + m) * a.rows + row + r, KBITQ_ISA::sum(sum[r][m]) + bias);
    }
}

template <typename Product, int kRows>
void multiply_rows(const Nf4LinearArgs& a, const typename Product::X* x, int64_t row) {
    int64_t m = 0;
    for (; m + 4 <= a.batch; m += 4) multiply<Product, kRows, 4>(a, x, row, m);
    for (; m + 2 <= a.batch; m += 2) multiply<Product, kRows, 2>(a, x, row, m);
    for (; m < a.batch; ++m) multiply<Product, kRows, 1>(a, x, row, m);
}

template <typename Product>
void linear(const Nf4LinearArgs& a, const void* x, int64_t begin, int64_t end) {
    const auto* arranged = static_cast<const typename Product::X*>(x);
    int64_t row = begin;
    for (; row + 2 <= end; row += 2) multiply_rows<Product, 2>(a, arranged, row);
    for (; row < end; ++row) multiply_rows<Product, 1>(a, arranged, row);
}
#endif

}  // namespace
}  // namespace kbitq::KBITQ_ISA
