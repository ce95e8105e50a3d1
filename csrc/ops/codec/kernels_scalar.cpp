// The codec's ops one element at a time: what the vector kernels are held against.
#include <cmath>

#include "codecs/block_scale.h"
#include "codecs/dispatch_scalar.h"
#include "cpu/element.h"
#include "cpu/scale_table.h"
#include "ops/codec/kernels.h"

namespace kbitq {
namespace {

SourceBlock read_source(const QuantizeArgs& a, float to_blocks, const BlockAt& at) {
    SourceBlock b{};
    b.length = at.length;
    const int64_t first = at.row * a.packed.cols + at.column;
    const float* importance = nullptr;
    if (a.importance) {
        importance = a.importance + at.row / (a.packed.rows / a.importance_rows) * a.packed.cols + at.column;
    }
    bool any = false;
    for (int i = 0; i < at.length; ++i) {
        b.v[i] = read_element(a.w, a.dtype, first + i) * to_blocks;
        b.most = std::fmax(b.most, std::fabs(b.v[i]));
        b.weight[i] = importance ? importance[i] : 1.0f;
        any = any || b.weight[i] != 0.0f;
    }
    for (int i = 0; i < at.length && !any; ++i) b.weight[i] = 1.0f;
    return b;
}

void quantize_scalar(const QuantizeArgs& a, const EncodeTables& tables, int64_t begin, int64_t end) {
    with_codec(a.packed, [&](auto codec) {
        SourceBlock source[kWideScaleBlocks];
        for (int64_t scale = begin; scale < end; ++scale) {
            const ScaleAt at = scale_at(a.packed, scale);
            for (int b = 0; b < at.blocks; ++b) {
                source[b] = read_source(a, tables.to_blocks, block_at(at.block + b, a.packed.cols));
            }
            if (a.rule == ScaleRule::exact) a.packed.float_scales[scale] = source[0].most;
            uint32_t* words = a.packed.words + at.block * codec.words();
            codec.encode(tables, source, at.blocks, a.rule, words, a.packed.scales + scale);
        }
    });
}

// W' of one block: what the decode rule gives, in float32.
template <typename C>
void decode_weights(float (&w)[kBlock], const C& codec, const PackedMatrix& packed, int64_t block) {
    const float s = scale_value(packed, scale_table(), scale_index(packed, block, block_at(block, packed.cols)));
    codec.decode_block(w, packed.words + block * codec.words(), packed.codebook);
    for (float& level : w) level *= s;
}

void dequantize_scalar(const DequantizeArgs& a, int64_t begin, int64_t end) {
    with_codec(a.packed, [&](auto codec) {
        float w[kBlock];
        for (int64_t block = begin; block < end; ++block) {
            const BlockAt at = block_at(block, a.packed.cols);
            const int64_t first = at.row * a.packed.cols + at.column;
            decode_weights(w, codec, a.packed, block);
            for (int i = 0; i < at.length; ++i) write_element(a.out, a.dtype, first + i, w[i]);
        }
    });
}

template <typename C>
void stats_of_row(const StatsArgs& a, const C& codec, int64_t row) {
    const int64_t cols = a.packed.cols, nblk = blocks_per_row(cols);
    double signal = 0, noise = 0, worst = 0;
    for (int64_t b = 0; b < nblk; ++b) {
        float decoded[kBlock];
        decode_weights(decoded, codec, a.packed, row * nblk + b);
        double ww[kBlock] = {}, ee[kBlock] = {};
        const int64_t column = b * kBlock;
        for (int i = 0; i < block_length(column, cols); ++i) {
            const double w = read_element(a.w, a.dtype, row * cols + column + i);
            const double e = w - static_cast<double>(decoded[i]);
            ww[i] = w * w;
            ee[i] = e * e;
            worst = std::fmax(worst, std::fabs(e));
        }
        signal += tree_sum(ww);
        noise += tree_sum(ee);
    }
    double* out = a.out + row * kStatsColumns;
    out[0] = signal;
    out[1] = noise;
    out[2] = worst;
}

void stats_scalar(const StatsArgs& a, int64_t begin, int64_t end) {
    with_codec(a.packed, [&](auto codec) {
        for (int64_t row = begin; row < end; ++row) stats_of_row(a, codec, row);
    });
}

void scan_scalar(const ScanArgs& a, int64_t begin, int64_t end, ScanRange& out) {
    out = {0.0f, 0, -1};
    for (int64_t i = begin; i < end; ++i) {
        const float m = std::fabs(read_element(a.w, a.dtype, i));
        if (m < INFINITY) {
            out.amax = std::fmax(out.amax, m);
        } else if (out.nonfinite++ == 0) {
            out.first = i;
        }
    }
}

}  // namespace

const Kernels kScalarKernels = {scan_scalar, quantize_scalar, dequantize_scalar, stats_scalar};

}  // namespace kbitq
