// quantize, vector: a block in registers, encoded there.
#pragma once

#include "codecs/dispatch_simd.h"
#include "ops/codec/quantize.h"

namespace kbitq::KBITQ_ISA {
namespace {

// A block's error weights: its importance, all ones where that is all zero; zeros past a row's end.
inline void load_weights(F (&weight)[kVectors], const QuantizeArgs& a, const BlockAt& at) {
    float ones[kBlock], tail[kBlock];
    for (float& one : ones) one = 1.0f;
    const float* from = ones;
    if (a.importance) {
        const int64_t row = at.row / (a.packed.rows / a.importance_rows);
        const float* importance = a.importance + row * a.packed.cols + at.column;
        for (int i = 0; i < at.length; ++i) from = importance[i] != 0.0f ? importance : from;
    }
    from = whole_block(tail, from, at.length);
    for (int q = 0; q < kVectors; ++q) weight[q] = load(from + q * kLanes);
}

inline void read_source(SourceBlock& b, const QuantizeArgs& a, F to_blocks, const BlockWalk& walk) {
    F most = splat(0.0f);
    b.length = (*walk).length;
    load_block(b.v, a.w, a.dtype, walk.first(), b.length);
    for (int q = 0; q < kVectors; ++q) {
        b.v[q] = mul(b.v[q], to_blocks);
        most = max(most, magnitude(b.v[q]));
    }
    b.most = largest(most);
}

template <typename C>
void quantize_with(const QuantizeArgs& a, const EncodeTables& tables, int64_t begin, int64_t end) {
    const typename C::Encoder encoder(tables);
    const F to_blocks = splat(tables.to_blocks);
    const ScaleRule rule = a.rule;
    BlockWalk walk(begin, a.packed.cols);
    for (int64_t block = begin; block < end; ++block, walk.next()) {
        SourceBlock b;
        read_source(b, a, to_blocks, walk);
        b.weighted = rule == ScaleRule::mse && (a.importance || b.length < kBlock);
        if (b.weighted) load_weights(b.weight, a, *walk);
        if (rule == ScaleRule::exact) a.packed.float_scales[block] = b.most;
        encoder.encode_block(b, rule, a.packed.words + block * C::kWords, a.packed.scales + block);
    }
}

void quantize(const QuantizeArgs& a, const EncodeTables& tables, int64_t begin, int64_t end) {
    with_codec(a.packed, [&](auto codec) { quantize_with<decltype(codec)>(a, tables, begin, end); });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
