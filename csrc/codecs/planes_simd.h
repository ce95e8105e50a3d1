// The codec `planes`, vector: bit planes to levels and back (format/block.h). Written once in the vocabulary of
// cpu/simd_*.h; each instruction set compiles its own copy in its own namespace (KBITQ_ISA).
#pragma once

#include "codecs/block_simd.h"
#include "codecs/planes_encode_tables.h"
#include "cpu/scale_table.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <int K>
class PlanesDecoder {
  public:
    explicit PlanesDecoder(const float* codebook) : levels_(codebook) {}

    template <Order kOrder>
    [[gnu::always_inline]] inline void decode_block(F (&level)[kVectors], const uint32_t* words) const {
        levels_.template look_up<kOrder == Order::interleaved>(level, words);
    }

  private:
    BlockTable<K> levels_;
};

// The search for an index settles one bit a step, most significant first, so its compare masks are the block's plane
// words. The first kLogLanes steps look their threshold up in one register (multiplied by the scale once a block);
// deeper ones in tables laid out by depth (PlanesTables::tree).
template <int K>
class PlanesSearch {
  public:
    explicit PlanesSearch(const PlanesTables& t) : t_(t), thresholds_(shallow_thresholds(t)) {}

    // The error of one scale over a block, summed in the tree of format.md section 3.
    template <bool kWeighted>
    inline float error_of(const SourceBlock& b, float s) const {
        const F scale = splat(s);
        const F scaled = mul(thresholds_, scale);
        F term[kVectors];
        for (int q = 0; q < kVectors; ++q) {
            const I index = run(scaled, scale, b.v[q], q, [](int, int, M) {});
            // Of a scale 0, d = v, whatever the index.
            const F d = sub(b.v[q], mul(lookup<(1 << K)>(t_.levels, index), scale));
            term[q] = mul(d, d);
            if constexpr (kWeighted) term[q] = mul(term[q], b.weight[q]);
        }
        return tree_sum(term);
    }

    inline void write_planes(const SourceBlock& b, float s, uint32_t* words) const {
        uint32_t plane[K] = {};
        if (s != 0.0f) {
            const F scale = splat(s);
            const F scaled = mul(thresholds_, scale);
            for (int q = 0; q < kVectors; ++q) {
                run(scaled, scale, b.v[q], q,
                    [&plane](int j, int vec, M above) { plane[j] |= mask_bits(above) << (kLanes * vec); });
            }
        }
        // Elements past the end, and all of a block of scale 0, have the index of zero.
        const uint32_t live = s == 0.0f ? 0u : b.length < kBlock ? (1u << b.length) - 1u : ~0u;
        for (int j = 0; j < K; ++j) {
            const uint32_t zero = (t_.zero >> j) & 1 ? ~0u : 0u;
            words[j] = (plane[j] & live) | (zero & ~live);
        }
    }

  private:
    static constexpr int kShallow = K < kLogLanes ? K : kLogLanes;

    // The thresholds of the first steps: every 2^(K - kShallow)-th, in order.
    static inline F shallow_thresholds(const PlanesTables& t) {
        if constexpr (K == kShallow) {
            return load(t.mid);
        } else {
            alignas(64) float every[kLanes] = {};
            for (int i = 0; i + 1 < (1 << kShallow); ++i) every[i] = t.mid[((i + 1) << (K - kShallow)) - 1];
            return load(every);
        }
    }

    // Calls settled(plane, q, mask) for each compare and returns the index of every lane of vector q.
    template <typename OnCompare>
    inline I run(F scaled, F scale, F v, int q, OnCompare settled) const {
        I index = splat_int(0);
        for (int bit = kShallow - 1; bit >= 0; --bit) {
            const M above = greater(v, permute(scaled, or_int(index, splat_int((1 << bit) - 1))));
            settled(K - kShallow + bit, q, above);
            index = or_where(index, above, 1 << bit);
        }
        if constexpr (K > kShallow) index = deeper<kShallow>(scale, v, q, index, settled);
        return index;
    }

    template <int kDepth, typename OnCompare>
    inline I deeper(F scale, F v, int q, I index, OnCompare settled) const {
        const M above = greater(v, mul(lookup<(1 << kDepth)>(t_.tree[kDepth], index), scale));
        settled(K - 1 - kDepth, q, above);
        index = or_where(double_int(index), above, 1);
        if constexpr (kDepth + 1 < K) index = deeper<kDepth + 1>(scale, v, q, index, settled);
        return index;
    }

    const PlanesTables& t_;
    F thresholds_;
};

template <int K>
class PlanesEncoder {
  public:
    explicit PlanesEncoder(const EncodeTables& tables) : top_(tables.top), search_(cast(tables)) {}

    inline void encode_block(const SourceBlock& b, ScaleRule rule, uint32_t* words, uint8_t* scale) const {
        float s = b.most;
        if (rule != ScaleRule::exact) {
            const int byte = s == 0.0f ? 0 : choose_byte(b, rule);
            *scale = static_cast<uint8_t>(byte);
            s = scales_[byte];
        }
        search_.write_planes(b, s, words);
    }

  private:
    static const PlanesTables& cast(const EncodeTables& tables) { return static_cast<const PlanesTables&>(tables); }
    inline int clip(int byte) const { return byte < 0 ? 0 : byte > top_ ? top_ : byte; }

    inline int choose_byte(const SourceBlock& b, ScaleRule rule) const {
        const int base = static_cast<int>(encode_e4m4(b.most));
        if (rule == ScaleRule::absmax) return clip(base);
        return b.weighted ? least_error_byte<true>(b, base) : least_error_byte<false>(b, base);
    }

    template <bool kWeighted>
    inline int least_error_byte(const SourceBlock& b, int base) const {
        int best = 0;
        float least = __builtin_inff();
        for (int d = first_candidate(K); d <= kLastCandidate; d += candidate_step(K)) {
            const int byte = clip(base + d);  // ascending: a strict < keeps the smallest byte on a tie
            const float error = search_.template error_of<kWeighted>(b, scales_[byte]);
            best = error < least ? byte : best;
            least = error < least ? error : least;
        }
        return best;
    }

    const float* scales_ = scale_table();
    int top_;
    PlanesSearch<K> search_;
};

template <int K>
struct Planes {
    static constexpr int kWords = K;  // of a block
    static constexpr int kScaleBlocks = 1;
    static constexpr bool kTogether = false;
    using Decoder = PlanesDecoder<K>;
    using Encoder = PlanesEncoder<K>;
};

}  // namespace
}  // namespace kbitq::KBITQ_ISA
