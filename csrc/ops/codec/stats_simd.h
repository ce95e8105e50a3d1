// stats, vector: a block decoded in registers and compared with its source in float64.
#pragma once

#include "codecs/block_scale.h"
#include "codecs/dispatch_simd.h"
#include "ops/codec/stats.h"

namespace kbitq::KBITQ_ISA {
namespace {

// The sums of one row.
struct RowStats {
    double signal = 0, noise = 0;
    D worst = zero_double();

    // Adds a block; past a row's end both are 0.
    inline void add(const F (&w)[kVectors], const F (&decoded)[kVectors]) {
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
};

template <typename C, DType kType>
[[gnu::noinline]] void stats_with(const StatsArgs& a, int64_t begin, int64_t end) {
    const float* scales = scale_table();
    const typename C::Decoder decoder(a.packed.codebook);
    const int64_t cols = a.packed.cols, nblk = blocks_per_row(cols);
    for (int64_t row = begin; row < end; ++row) {
        RowStats sums;
        for (int64_t b = 0; b < nblk; ++b) {
            const int64_t block = row * nblk + b, column = b * kBlock;
            const int length = block_length(column, cols);
            F w[kVectors], decoded[kVectors];
            load_block(w, a.w, kType, row * cols + column, length);
            const float scale = scale_value(a.packed, scales, scale_index_of<C>(a.packed, block, row, column));
            decode_weights(decoded, decoder, a.packed.words + block * C::kWords, scale);
            clear_tail(decoded, length);
            sums.add(w, decoded);
        }
        double* out = a.out + row * kStatsColumns;
        out[0] = sums.signal;
        out[1] = sums.noise;
        out[2] = largest(sums.worst);
    }
}

void stats(const StatsArgs& a, int64_t begin, int64_t end) {
    with_codec(a.packed, [&](auto codec) {
        with_element(a.dtype, [&](auto d) { stats_with<decltype(codec), d>(a, begin, end); });
    });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
