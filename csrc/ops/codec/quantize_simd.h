// quantize, vector: a block in registers, encoded there.
#pragma once

#include "codecs/block_scale.h"
#include "codecs/dispatch_simd.h"
#include "ops/codec/quantize.h"

namespace kbitq::KBITQ_ISA {
namespace {

// A block's error weights: its importance, which is not negative, all ones where that is all zero; zeros past a row's
// end.
[[gnu::always_inline]] inline void load_weights(F (&weight)[kVectors], const QuantizeArgs& a, const BlockAt& at) {
    uint32_t positive = 0;
    if (a.importance) {
        const int64_t row = at.row / (a.packed.rows / a.importance_rows);
        float tail[kBlock];
        const float* from = whole_block(tail, a.importance + row * a.packed.cols + at.column, at.length);
        for (int q = 0; q < kVectors; ++q) {
            weight[q] = load(from + q * kLanes);
            positive |= mask_bits(greater(weight[q], splat(0.0f)));
        }
    }
    if (positive == 0) {
        for (int q = 0; q < kVectors; ++q) weight[q] = splat(1.0f);
        clear_tail(weight, at.length);
    }
}

// `first`: the block's first element in the matrix.
[[gnu::always_inline]] inline void read_source(SourceBlock& b, const QuantizeArgs& a, F to_blocks, int64_t first,
                                               int length) {
    F most = splat(0.0f);
    b.length = length;
    load_block(b.v, a.w, a.dtype, first, length);
    for (int q = 0; q < kVectors; ++q) {
        b.v[q] = mul(b.v[q], to_blocks);
        most = max(most, magnitude(b.v[q]));
    }
    b.most = largest(most);
}

// kSearch: for the rule `mse`, which alone looks at weights.
template <typename C, bool kSearch>
[[gnu::noinline]] void quantize_with(const QuantizeArgs& a, const EncodeTables& tables, int64_t begin, int64_t end) {
    const typename C::Encoder encoder(tables);
    const F to_blocks = splat(tables.to_blocks);
    const ScaleRule fixed = a.rule == ScaleRule::exact ? ScaleRule::exact : ScaleRule::absmax;
    const ScaleRule rule = kSearch ? ScaleRule::mse : fixed;
    BlockWalk walk(begin, a.packed.cols);
    for (int64_t block = begin; block < end; ++block, walk.next()) {
        SourceBlock b;
        read_source(b, a, to_blocks, walk.first(), (*walk).length);
        b.weighted = kSearch && (a.importance || b.length < kBlock);
        if (b.weighted) load_weights(b.weight, a, *walk);
        if (rule == ScaleRule::exact) a.packed.float_scales[block] = b.most;
        encoder.encode_block(b, rule, a.packed.words + block * C::kWords, a.packed.scales + block);
    }
}

// The same for a codec that encodes many blocks side by side.
template <typename C>
void quantize_together(const QuantizeArgs& a, const EncodeTables& tables, int64_t begin, int64_t end) {
    using Encoder = typename C::Encoder;
    Encoder encoder(tables);
    const F to_blocks = splat(tables.to_blocks);
    for (int64_t first = begin; first < end; first += Encoder::kUnits) {
        const int units = end - first < Encoder::kUnits ? static_cast<int>(end - first) : Encoder::kUnits;
        encoder.clear();
        for (int u = 0; u < units; ++u) {
            const ScaleAt scale = scale_at(a.packed, first + u);
            if (a.rule == ScaleRule::given) encoder.give(u, a.packed.scales[first + u]);
            for (int b = 0; b < scale.blocks; ++b) {
                const BlockAt at = block_at(scale.block + b, a.packed.cols);
                SourceBlock source;
                read_source(source, a, to_blocks, at.row * a.packed.cols + at.column, at.length);
                source.weighted = a.importance || at.length < kBlock;
                if (source.weighted) load_weights(source.weight, a, at);
                encoder.put(u, b, source);
            }
        }
        encoder.encode(a.rule);
        for (int u = 0; u < units; ++u) {
            const ScaleAt scale = scale_at(a.packed, first + u);
            a.packed.scales[first + u] = encoder.take(u, a.packed.words + scale.block * C::kWords);
        }
    }
}

void quantize(const QuantizeArgs& a, const EncodeTables& tables, int64_t begin, int64_t end) {
    with_codec(a.packed, [&](auto codec) {
        using C = decltype(codec);
        if constexpr (C::kTogether) {
            quantize_together<C>(a, tables, begin, end);
        } else {
            a.rule == ScaleRule::mse ? quantize_with<C, true>(a, tables, begin, end)
                                     : quantize_with<C, false>(a, tables, begin, end);
        }
    });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
