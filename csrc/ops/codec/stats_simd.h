// stats, vector: a block decoded in registers and compared with its source in float64.
#pragma once

#include "codecs/planes_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <int K>
void stats_k(const StatsArgs& a, int64_t begin, int64_t end) {
    const float* scales = scale_table();
    const Levels<K> levels(a.packed.codebook);
    const int64_t nblk = blocks_per_row(a.packed.cols);
    for (int64_t row = begin; row < end; ++row) {
        double signal = 0, noise = 0;
        D worst = zero_double();
        for (int64_t b = 0; b < nblk; ++b) {
            const int64_t block = row * nblk + b;
            const int64_t column = b * kBlock, left = a.packed.cols - column;
            const int length = left < kBlock ? static_cast<int>(left) : kBlock;
            F w[kVectors], decoded[kVectors];
            load_block(w, a.w, a.dtype, row * a.packed.cols + column, length);
            decode_block<K>(decoded, a.packed.words + block * K, levels, block_scale(a.packed, scales, block));
            if (length < kBlock) {  // past the end both are 0
                alignas(64) float tail[kBlock];
                for (int q = 0; q < kVectors; ++q) store(tail + q * kLanes, decoded[q]);
                for (int i = length; i < kBlock; ++i) tail[i] = 0.0f;
                for (int q = 0; q < kVectors; ++q) decoded[q] = load(tail + q * kLanes);
            }
            D ww[kDoubleVectors], ee[kDoubleVectors];
            for (int q = 0; q < kDoubleVectors; ++q) {
                const D x = widen(w, q);
                const D e = sub(x, widen(decoded, q));
                ww[q] = mul(x, x);
                ee[q] = mul(e, e);
                worst = max(worst, magnitude(e));
            }
            signal += tree_sum(ww);
            noise += tree_sum(ee);
        }
        double* out = a.out + row * kStatsColumns;
        out[0] = signal;
        out[1] = noise;
        out[2] = largest(worst);
    }
}

void stats(const StatsArgs& a, int64_t begin, int64_t end) {
    with_bits(a.packed.k, [&](auto bits) { stats_k<bits>(a, begin, end); });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
