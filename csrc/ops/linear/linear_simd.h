// linear, vector. One block of one row of W costs K mask or byte operations, a register lookup per vector and a
// multiply-add per vector and row of x; its scale is applied once, to the block's partial sum:
//
//     acc[row][m] += scale * (level[0] * x[m][0] + level[1] * x[m][1] + ...)
//
// Several rows of W go side by side, so that their chains of additions overlap.
#pragma once

#include "codecs/planes_simd.h"
#include "cpu/element.h"
#include "ops/codec/kernels.h"
#include "ops/linear/linear_kernels.h"

namespace kbitq::KBITQ_ISA {
namespace {

// Rows [row, row + R) of W times rows [m, m + B) of x.
template <int K, int R, int B>
inline void linear_tile(const LinearArgs& a, const float* x, const Levels<K>& levels, const float* scales, int64_t row,
                        int64_t m) {
    const int64_t nblk = blocks_per_row(a.weight.cols);
    const uint32_t* words[R];
    const uint8_t* bytes[R];
    F acc[R][B];
    for (int r = 0; r < R; ++r) {
        words[r] = a.weight.words + (row + r) * nblk * K;
        bytes[r] = a.weight.scales + (row + r) * nblk;
        for (int b = 0; b < B; ++b) acc[r][b] = splat(0.0f);
    }
    const float* xs = x + m * nblk * kBlock;
    for (int64_t block = 0; block < nblk; ++block, xs += kBlock) {
        for (int r = 0; r < R; ++r) {
            I index[kVectors];
            F level[kVectors];
            unpack_interleaved<K>(index, words[r] + block * K);
            for (int q = 0; q < kVectors; ++q) level[q] = lookup<(1 << K)>(levels.value, index[q]);
            const F scale = splat(scales[bytes[r][block]]);
            for (int b = 0; b < B; ++b) {
                const float* xb = xs + b * nblk * kBlock;
                F part = mul(level[0], load(xb));
                for (int q = 1; q < kVectors; ++q) part = fused(level[q], load(xb + q * kLanes), part);
                acc[r][b] = fused(part, scale, acc[r][b]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        const float bias = a.bias ? read_element(a.bias, a.dtype, row + r) : 0.0f;
        for (int b = 0; b < B; ++b)
            write_element(a.y, a.dtype, (m + b) * a.weight.rows + row + r, sum(acc[r][b]) + bias);
    }
}

template <int K, int R, int B>
inline void linear_rows(const LinearArgs& a, const float* x, const Levels<K>& levels, int64_t begin, int64_t end,
                        int64_t m) {
    const float* scales = scale_table();
    int64_t row = begin;
    for (; row + R <= end; row += R) linear_tile<K, R, B>(a, x, levels, scales, row, m);
    for (; row < end; ++row) linear_tile<K, 1, B>(a, x, levels, scales, row, m);
}

template <int K>
void linear_k(const LinearArgs& a, const float* x, int64_t begin, int64_t end) {
    const int64_t group = a.weight.rows / a.weight.groups;
    while (begin < end) {  // one codebook at a time
        const int64_t g = begin / group;
        const int64_t stop = (g + 1) * group < end ? (g + 1) * group : end;
        const Levels<K> levels(a.weight.codebook + (g << K));
        int64_t m = 0;
        for (; m + 8 <= a.batch; m += 8) linear_rows<K, 1, 8>(a, x, levels, begin, stop, m);
        for (; m + 4 <= a.batch; m += 4) linear_rows<K, 2, 4>(a, x, levels, begin, stop, m);
        for (; m + 2 <= a.batch; m += 2) linear_rows<K, 4, 2>(a, x, levels, begin, stop, m);
        for (; m < a.batch; ++m) linear_rows<K, 4, 1>(a, x, levels, begin, stop, m);
        begin = stop;
    }
}

void linear(const LinearArgs& a, const float* x, int64_t begin, int64_t end) {
    with_bits(a.weight.k, [&](auto bits) { linear_k<bits>(a, x, begin, end); });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
