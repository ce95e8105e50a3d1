// quantize, vector: a block in registers, all candidates of the `mse` rule tried on it there.
//
// The search for an index settles one bit a step, most significant first, so its compare masks are the block's plane
// words. The first kLogLanes steps look their threshold up in one register (multiplied by the scale once a block);
// deeper ones in tables laid out by depth (QuantizeTables::tree).
#pragma once

#include "codecs/planes_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <int K>
struct Search {
    static constexpr int kShallow = K < kLogLanes ? K : kLogLanes;

    // Calls settled(plane, q, mask) for each compare and returns the index of every lane of vector q.
    template <typename OnCompare>
    static inline I run(const QuantizeTables& t, F thresholds, F scale, F v, int q, OnCompare settled) {
        I index = splat_int(0);
        for (int bit = kShallow - 1; bit >= 0; --bit) {
            const M above = greater(v, permute(thresholds, or_int(index, splat_int((1 << bit) - 1))));
            settled(K - kShallow + bit, q, above);
            index = or_where(index, above, 1 << bit);
        }
        if constexpr (K > kShallow) index = deeper<kShallow>(t, scale, v, q, index, settled);
        return index;
    }

    template <int Depth, typename OnCompare>
    static inline I deeper(const QuantizeTables& t, F scale, F v, int q, I index, OnCompare settled) {
        const M above = greater(v, mul(lookup<(1 << Depth)>(t.tree[Depth], index), scale));
        settled(K - 1 - Depth, q, above);
        index = or_where(double_int(index), above, 1);
        if constexpr (Depth + 1 < K) index = deeper<Depth + 1>(t, scale, v, q, index, settled);
        return index;
    }

    // The thresholds of the first steps: every 2^(K - kShallow)-th, in order.
    static inline F shallow_thresholds(const QuantizeTables& t) {
        if constexpr (K == kShallow) {
            return load(t.mid);
        } else {
            alignas(64) float every[kLanes] = {};
            for (int i = 0; i + 1 < (1 << kShallow); ++i) every[i] = t.mid[((i + 1) << (K - kShallow)) - 1];
            return load(every);
        }
    }
};

// The error of one scale over a block, summed in the tree of format.md section 3.
template <int K, bool Weighted>
inline float error_of(const QuantizeTables& t, F thresholds, const F (&v)[kVectors], const F (&weight)[kVectors],
                      float s) {
    const F scale = splat(s);
    const F scaled = mul(thresholds, scale);
    F term[kVectors];
    for (int q = 0; q < kVectors; ++q) {
        const I index = Search<K>::run(t, scaled, scale, v[q], q, [](int, int, M) {});
        const F d = sub(v[q], mul(lookup<(1 << K)>(t.levels, index), scale));  // s = 0: d = v, whatever the index
        term[q] = mul(d, d);
        if constexpr (Weighted) term[q] = mul(term[q], weight[q]);
    }
    return tree_sum(term);
}

inline int clip_byte(int byte, int top) { return byte < 0 ? 0 : byte > top ? top : byte; }

template <int K, bool Weighted>
inline int least_error_byte(const QuantizeTables& t, const float* scales, F thresholds, const F (&v)[kVectors],
                            const F (&weight)[kVectors], int base) {
    int best = 0;
    float least = __builtin_inff();
    for (int d = first_candidate(K); d <= kLastCandidate; d += candidate_step(K)) {
        const int byte = clip_byte(base + d, t.top);  // ascending: a strict < keeps the smallest byte on a tie
        const float error = error_of<K, Weighted>(t, thresholds, v, weight, scales[byte]);
        best = error < least ? byte : best;
        least = error < least ? error : least;
    }
    return best;
}

// A block's error weights: its importance, all ones where that is all zero; zeros past a row's end.
inline void load_weights(F (&weight)[kVectors], const QuantizeArgs& a, const BlockAt& at) {
    alignas(64) float w[kBlock] = {};
    const float* importance =
        a.importance ? a.importance + at.row / (a.packed.rows / a.importance_rows) * a.packed.cols + at.column
                     : nullptr;
    bool any = false;
    for (int i = 0; i < at.length; ++i) {
        w[i] = importance ? importance[i] : 1.0f;
        any = any || w[i] != 0.0f;
    }
    for (int i = 0; i < at.length && !any; ++i) w[i] = 1.0f;
    for (int q = 0; q < kVectors; ++q) weight[q] = load(w + q * kLanes);
}

template <int K>
inline void store_planes(const QuantizeTables& t, F thresholds, const F (&v)[kVectors], float s, int length,
                         uint32_t* words) {
    uint32_t plane[K] = {};
    if (s != 0.0f) {
        const F scale = splat(s);
        const F scaled = mul(thresholds, scale);
        for (int q = 0; q < kVectors; ++q) {
            Search<K>::run(t, scaled, scale, v[q], q,
                           [&plane](int j, int vec, M above) { plane[j] |= mask_bits(above) << (kLanes * vec); });
        }
    }
    // Elements past the end, and all of a block of scale 0, have the index of zero.
    const uint32_t live = s == 0.0f ? 0u : length < kBlock ? (1u << length) - 1u : ~0u;
    for (int j = 0; j < K; ++j) {
        const uint32_t zero = (t.zero >> j) & 1 ? ~0u : 0u;
        words[j] = (plane[j] & live) | (zero & ~live);
    }
}

template <int K>
void quantize_k(const QuantizeArgs& a, const QuantizeTables& t, int64_t begin, int64_t end) {
    const float* scales = scale_table();
    const F thresholds = Search<K>::shallow_thresholds(t);
    const F to_blocks = splat(t.to_blocks);
    BlockWalk walk(begin, a.packed.cols);
    for (int64_t block = begin; block < end; ++block, walk.next()) {
        const BlockAt& at = *walk;
        F v[kVectors], most = splat(0.0f);
        load_block(v, a.w, a.dtype, walk.first(), at.length);
        for (int q = 0; q < kVectors; ++q) {
            v[q] = mul(v[q], to_blocks);
            most = max(most, magnitude(v[q]));
        }
        float s = largest(most);
        if (a.packed.float_scales) {
            a.packed.float_scales[block] = s;
        } else {
            int byte = 0;
            if (s != 0.0f) {
                const int base = static_cast<int>(encode_e4m4(s));
                if (a.rule == ScaleRule::absmax) {
                    byte = clip_byte(base, t.top);
                } else if (a.importance || at.length < kBlock) {
                    F weight[kVectors];
                    load_weights(weight, a, at);
                    byte = least_error_byte<K, true>(t, scales, thresholds, v, weight, base);
                } else {
                    byte = least_error_byte<K, false>(t, scales, thresholds, v, v, base);
                }
            }
            a.packed.scales[block] = static_cast<uint8_t>(byte);
            s = scales[byte];
        }
        store_planes<K>(t, thresholds, v, s, at.length, a.packed.words + block * K);
    }
}

void quantize(const QuantizeArgs& a, const QuantizeTables& t, int64_t begin, int64_t end) {
    with_bits(a.packed.k, [&](auto bits) { quantize_k<bits>(a, t, begin, end); });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
