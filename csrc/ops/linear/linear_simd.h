// linear, vector: the loops over W and x, for any product of a block of W with a block of x. Its scale is applied once,
// to the block's partial sum:
//
//     acc[row][m] += scale * (level[0] * x[m][0] + level[1] * x[m][1] + ...)
//
// Several rows of W go side by side, so that their chains of additions overlap.
//
// A product says what x is, how a block of W is decoded for it, and how one is multiplied by the other (FloatProduct
// here, Bf16Product in linear_bf16.h).
#pragma once

#include "codecs/dispatch_simd.h"
#include "cpu/scale_table.h"
#include "ops/linear/linear_kernels.h"

namespace kbitq::KBITQ_ISA {
namespace {

// x as float32: K mask or byte operations for the indices, a register lookup a vector, and a multiply-add a vector and
// row of x.
template <typename C>
struct FloatProduct {
    using X = float;
    static constexpr int kRowsBy8 = 1, kRowsBy4 = 2, kRowsBy2 = 4;  // rows of W beside 8, 4, and 2 or 1 rows of x
    struct Levels {
        F vector[kVectors];
    };

    typename C::Decoder decoder;
    explicit FloatProduct(const float* codebook) : decoder(codebook) {}

    inline Levels decode_block(const uint32_t* words) const {
        Levels levels;
        decoder.template decode_block<Order::interleaved>(levels.vector, words);
        return levels;
    }
    static inline F multiply(const Levels& levels, const float* x) {
        F part = mul(levels.vector[0], load(x));
        for (int q = 1; q < kVectors; ++q) part = fused(levels.vector[q], load(x + q * kLanes), part);
        return part;
    }
};

// Rows [row, row + R) of W times rows [m, m + B) of x.
template <typename C, typename Product, int R, int B>
inline void linear_tile(const LinearArgs& a, const typename Product::X* x, const Product& product, const float* scales,
                        int64_t row, int64_t m) {
    const int64_t nblk = blocks_per_row(a.weight.cols);
    const uint32_t* words[R];
    const uint8_t* bytes[R];
    F acc[R][B];
    for (int r = 0; r < R; ++r) {
        words[r] = a.weight.words + (row + r) * nblk * C::kWords;
        bytes[r] = a.weight.scales + (row + r) * scales_per_row(a.weight.cols, C::kScaleBlocks);
        for (int b = 0; b < B; ++b) acc[r][b] = splat(0.0f);
    }
    const auto* xs = x + m * nblk * kBlock;
    for (int64_t block = 0; block < nblk; ++block, xs += kBlock) {
        for (int r = 0; r < R; ++r) {
            const auto levels = product.decode_block(words[r] + block * C::kWords);
            const F scale = splat(scales[bytes[r][block / C::kScaleBlocks]]);
            for (int b = 0; b < B; ++b) {
                acc[r][b] = fused(Product::multiply(levels, xs + b * nblk * kBlock), scale, acc[r][b]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        const float bias = a.bias ? read_element(a.bias, a.dtype, row + r) : 0.0f;
        for (int b = 0; b < B; ++b) {
            write_element(a.y, a.dtype, (m + b) * a.weight.rows + row + r, sum(acc[r][b]) + bias);
        }
    }
}

template <typename C, typename Product, int R, int B>
inline void linear_rows(const LinearArgs& a, const typename Product::X* x, const Product& product, int64_t begin,
                        int64_t end, int64_t m) {
    const float* scales = scale_table();
    int64_t row = begin;
    for (; row + R <= end; row += R) linear_tile<C, Product, R, B>(a, x, product, scales, row, m);
    for (; row < end; ++row) linear_tile<C, Product, 1, B>(a, x, product, scales, row, m);
}

template <typename C, typename Product>
void linear_with(const LinearArgs& a, const void* arranged, int64_t begin, int64_t end) {
    const auto* x = static_cast<const typename Product::X*>(arranged);
    const int64_t group = a.weight.rows / a.weight.groups;
    while (begin < end) {  // one codebook at a time
        const int64_t g = begin / group;
        const int64_t stop = (g + 1) * group < end ? (g + 1) * group : end;
        const Product product(a.weight.codebook + g * level_count(a.weight));
        int64_t m = 0;
        for (; m + 8 <= a.batch; m += 8) linear_rows<C, Product, Product::kRowsBy8, 8>(a, x, product, begin, stop, m);
        for (; m + 4 <= a.batch; m += 4) linear_rows<C, Product, Product::kRowsBy4, 4>(a, x, product, begin, stop, m);
        for (; m + 2 <= a.batch; m += 2) linear_rows<C, Product, Product::kRowsBy2, 2>(a, x, product, begin, stop, m);
        for (; m < a.batch; ++m) linear_rows<C, Product, Product::kRowsBy2, 1>(a, x, product, begin, stop, m);
        begin = stop;
    }
}

template <template <typename> class Product>
void linear(const LinearArgs& a, const void* x, int64_t begin, int64_t end) {
    with_codec(a.weight, [&](auto codec) {
        using C = decltype(codec);
        linear_with<C, Product<C>>(a, x, begin, end);
    });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
