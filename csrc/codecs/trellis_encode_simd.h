// Encoding of the codec `trellis`, vector: as many blocks side by side as a vector has lanes, a block a lane, so that
// no operation crosses lanes. Written once in the vocabulary of cpu/simd_*.h; each instruction set compiles its own
// copy in its own namespace (KBITQ_ISA).
//
// A lap keeps the least error of 64 states, a vector each. Two states that differ in their oldest bit lead to the same
// two states (a butterfly), and their four branches have four of the eight classes:
//
//     s       --- class z ------------->  2s         z: class_of_state(s)
//       \  ,--- class z ^ 6 ---------´
//        \/
//        /\ `--- class z ^ 4 -------.
//       /  `                         `->  2s + 1
//     s + 32  --- class z ^ 2 ------>
#pragma once

#include <utility>

#include "codecs/block_simd.h"
#include "codecs/trellis_encode_tables.h"
#include "cpu/scale_table.h"

namespace kbitq::KBITQ_ISA {
namespace {

// The errors of one scale a lane, and the laps over them.
template <int K>
class TrellisLaps {
  public:
    // The error of the nearest level of each class, of elements v under the scales; kPick: and which level it is.
    template <bool kWeighted, bool kPick>
    void measure(const float (&v)[kBlock][kLanes], const float (&weight)[kBlock][kLanes], const float* levels,
                 F scale) {
        alignas(64) float scaled[kLevels][kLanes];
        for (int i = 0; i < kLevels; ++i) store(scaled[i], mul(splat(levels[i]), scale));
        for (int i = 0; i < kBlock; ++i) {
            const F x = load(v[i]);
            for (int z = 0; z < kClasses; ++z) {
                F least = error<kWeighted>(x, scaled[z], weight[i]);
                I pick = splat_int(0);
                for (int j = 1; j < kOfClass; ++j) {
                    const F e = error<kWeighted>(x, scaled[z + kClasses * j], weight[i]);
                    if constexpr (kPick) pick = where(greater(least, e), splat_int(j), pick);
                    least = min(e, least);
                }
                store(least_[i][z], least);
                if constexpr (kPick) store(pick_[i][z], pick);
            }
        }
    }

    // The state through which the best walk goes that need not close.
    I best_start() {
        for (int s = 0; s < kStates; ++s) store(metric_[0][s], splat(0.0f));
        for (int i = 0; i < kBlock; ++i) step<false>(i, kEachButterfly);
        for (int s = 0; s < kStates; ++s) store(after_[0][s], splat(0.0f));
        for (int i = kBlock - 1; i >= 0; --i) step_back(i, kEachButterfly);
        F least = add(load(metric_[0][0]), load(after_[0][0]));
        I best = splat_int(0);
        for (int s = 1; s < kStates; ++s) {
            const F sum = add(load(metric_[0][s]), load(after_[0][s]));
            best = where(greater(least, sum), splat_int(s), best);
            least = min(sum, least);
        }
        return best;
    }

    // The least error of a lap from each lane's state to itself; kTrace: notes where each state was best reached from.
    template <bool kTrace>
    void walk_from(I start, float (&error)[kLanes]) {
        for (int s = 0; s < kStates; ++s) {
            store(metric_[0][s], where(equal(start, splat_int(s)), splat(0.0f), splat(__builtin_inff())));
        }
        for (int i = 0; i < kBlock; ++i) step<kTrace>(i, kEachButterfly);
        int from[kLanes];
        store(from, start);
        for (int lane = 0; lane < kLanes; ++lane) error[lane] = metric_[0][from[lane]][lane];
    }

    // The paths of the walks from `start`, of which walk_from<true> made notes.
    void trace(I start, uint32_t (&path)[kLanes]) const {
        int state[kLanes];
        store(state, start);
        for (uint32_t& p : path) p = 0;
        for (int i = kBlock - 1; i >= 0; --i) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const int s = state[lane];
                path[lane] |= static_cast<uint32_t>(s & 1) << ((i + 1) % kBlock);
                state[lane] = s >> 1 | (from_upper_[i][s] >> lane & 1) << (kPathBits - 1);
            }
        }
    }

    // The words of a lane's block from its path.
    void write(int lane, uint32_t path, uint32_t* words) const {
        const uint32_t bit_1 = path_bit_1(path), bit_2 = path_bit_2(path);
        uint32_t upper[kTrellisMaxBits] = {};
        if constexpr (K > 1) {
            for (int i = 0; i < kBlock; ++i) {
                const uint32_t z = (path >> i & 1u) | (bit_1 >> i & 1u) << 1 | (bit_2 >> i & 1u) << 2;
                const uint32_t pick = static_cast<uint32_t>(pick_[i][z][lane]);
                for (int j = 0; j < K - 1; ++j) upper[j] |= (pick >> j & 1u) << i;
            }
        }
        words[0] = path;
        for (int j = 1; j < K; ++j) words[j] = upper[j - 1];
    }

  private:
    static constexpr int kLevels = trellis_levels(K);
    static constexpr int kOfClass = levels_of_class(K);
    static constexpr std::make_integer_sequence<int, kStates / 2> kEachButterfly{};

    template <bool kWeighted>
    static inline F error(F x, const float* level, const float* weight) {
        const F d = sub(x, load(level));
        const F e = mul(d, d);
        return kWeighted ? mul(e, load(weight)) : e;
    }

    // Element i forward: the metrics after it from those before it. They are in metric_[0] for an even i.
    template <bool kTrace, int... S>
    inline void step(int i, std::integer_sequence<int, S...>) {
        F e[kClasses];
        for (int z = 0; z < kClasses; ++z) e[z] = load(least_[i][z]);
        const float (*from)[kLanes] = metric_[i % 2];
        float (*to)[kLanes] = metric_[1 - i % 2];
        (butterfly<kTrace, S>(from, to, e, from_upper_[i]), ...);
    }

    template <bool kTrace, int S>
    static inline void butterfly(const float (*from)[kLanes], float (*to)[kLanes], const F (&e)[kClasses],
                                 uint16_t* from_upper) {
        constexpr int z = class_of_state(S);
        const F lower = load(from[S]), upper = load(from[S + kStates / 2]);
        const F zero_lower = add(lower, e[z]), zero_upper = add(upper, e[z ^ kOldestTurns]);
        const F one_lower = add(lower, e[z ^ kAppendedTurns]),
                one_upper = add(upper, e[z ^ kAppendedTurns ^ kOldestTurns]);
        store(to[2 * S], min(zero_upper, zero_lower));
        store(to[2 * S + 1], min(one_upper, one_lower));
        if constexpr (kTrace) {  // on a tie the smaller state
            from_upper[2 * S] = static_cast<uint16_t>(mask_bits(greater(zero_lower, zero_upper)));
            from_upper[2 * S + 1] = static_cast<uint16_t>(mask_bits(greater(one_lower, one_upper)));
        }
    }

    // Element i backward: the least errors from it on, from those after it.
    template <int... S>
    inline void step_back(int i, std::integer_sequence<int, S...>) {
        F e[kClasses];
        for (int z = 0; z < kClasses; ++z) e[z] = load(least_[i][z]);
        const float (*from)[kLanes] = after_[1 - i % 2];
        float (*to)[kLanes] = after_[i % 2];
        (butterfly_back<S>(from, to, e), ...);
    }

    template <int S>
    static inline void butterfly_back(const float (*from)[kLanes], float (*to)[kLanes], const F (&e)[kClasses]) {
        constexpr int z = class_of_state(S);
        const F zero = load(from[2 * S]), one = load(from[2 * S + 1]);
        store(to[S], min(add(one, e[z ^ kAppendedTurns]), add(zero, e[z])));
        store(to[S + kStates / 2], min(add(one, e[z ^ kAppendedTurns ^ kOldestTurns]), add(zero, e[z ^ kOldestTurns])));
    }

    alignas(64) float least_[kBlock][kClasses][kLanes];
    alignas(64) float metric_[2][kStates][kLanes];  // forward
    alignas(64) float after_[2][kStates][kLanes];   // backward
    alignas(64) int32_t pick_[kBlock][kClasses][kLanes];
    uint16_t from_upper_[kBlock][kStates];
};

// Takes kUnits scales with their blocks: put each block, encode, take each scale.
template <int K, int ScaleBlocks>
class TrellisEncoder {
  public:
    static constexpr int kUnits = kLanes / ScaleBlocks;

    explicit TrellisEncoder(const EncodeTables& tables) : t_(static_cast<const TrellisTables&>(tables)) { clear(); }

    // Block b of scale u.
    void put(int u, int b, const SourceBlock& block) {
        const int lane = u * ScaleBlocks + b;
        float column[kBlock];
        for (int q = 0; q < kVectors; ++q) store(column + q * kLanes, block.v[q]);
        for (int i = 0; i < kBlock; ++i) v_[i][lane] = column[i];
        most_[u] = block.most > most_[u] ? block.most : most_[u];
        blocks_[u] = b + 1;
        if (!block.weighted) return;
        for (int q = 0; q < kVectors; ++q) store(column + q * kLanes, block.weight[q]);
        for (int i = 0; i < kBlock; ++i) weight_[i][lane] = column[i];
        weighted_ = true;
    }

    // The byte of scale u, for the rule `given`.
    void give(int u, uint8_t byte) { byte_[u] = byte; }

    // Chooses the scale and the walks of all that was put.
    void encode(ScaleRule rule) { weighted_ ? encode_as<true>(rule) : encode_as<false>(rule); }

    // The words of scale u; returns its byte.
    uint8_t take(int u, uint32_t* words) const {
        for (int b = 0; b < blocks_[u]; ++b, words += K) {
            const int lane = u * ScaleBlocks + b;
            if (byte_[u] == 0) {
                for (int j = 0; j < K; ++j) words[j] = zero_block_word(K, j);
            } else {
                laps_.write(lane, path_[lane], words);
            }
        }
        return static_cast<uint8_t>(byte_[u]);
    }

    void clear() {
        for (int i = 0; i < kBlock; ++i) {
            store(v_[i], splat(0.0f));
            store(weight_[i], splat(1.0f));
        }
        for (int u = 0; u < kUnits; ++u) most_[u] = 0.0f, blocks_[u] = 0, byte_[u] = 0;
        weighted_ = false;
    }

  private:
    template <bool kWeighted>
    void encode_as(ScaleRule rule) {
        float least[kUnits];
        I start = splat_int(0);
        for (int u = 0; u < kUnits; ++u) {
            if (rule != ScaleRule::given) byte_[u] = rule == ScaleRule::absmax ? clip_byte(t_, base(u)) : 0;
            least[u] = __builtin_inff();
        }
        for (int n = 0; n < kTrellisCandidates && rule == ScaleRule::mse; ++n) {
            start = try_candidate<kWeighted>(n, start, least);
        }
        laps_.template measure<kWeighted, true>(v_, weight_, t_.levels, scale_of(byte_));
        if (rule != ScaleRule::mse) start = laps_.best_start();
        float error[kLanes];
        laps_.template walk_from<true>(start, error);
        laps_.trace(start, path_);
    }

    // Takes the candidate where its error is the least so far; returns where the best walks start.
    template <bool kWeighted>
    I try_candidate(int n, I best, float (&least)[kUnits]) {
        int byte[kUnits];
        for (int u = 0; u < kUnits; ++u) byte[u] = clip_byte(t_, base(u) + trellis_candidate(K, ScaleBlocks, n));
        laps_.template measure<kWeighted, false>(v_, weight_, t_.levels, scale_of(byte));
        const I start = laps_.best_start();
        float error[kLanes];
        laps_.template walk_from<false>(start, error);
        int from[kLanes], chosen[kLanes];
        store(from, start);
        store(chosen, best);
        for (int u = 0; u < kUnits; ++u) {
            float sum = 0.0f;
            for (int b = 0; b < blocks_[u]; ++b) sum += error[u * ScaleBlocks + b];
            if (!(sum < least[u])) continue;  // ascending: the smallest byte on a tie
            least[u] = sum;
            byte_[u] = byte[u];
            for (int b = 0; b < ScaleBlocks; ++b) chosen[u * ScaleBlocks + b] = from[u * ScaleBlocks + b];
        }
        return load(chosen);
    }

    int base(int u) const { return static_cast<int>(encode_e4m4(most_[u])); }

    F scale_of(const int (&byte)[kUnits]) const {
        alignas(64) float scale[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) scale[lane] = scales_[byte[lane / ScaleBlocks]];
        return load(scale);
    }

    const TrellisTables& t_;
    const float* scales_ = scale_table();
    TrellisLaps<K> laps_;
    alignas(64) float v_[kBlock][kLanes], weight_[kBlock][kLanes];
    bool weighted_;
    float most_[kUnits];  // of a scale
    int byte_[kUnits], blocks_[kUnits];
    uint32_t path_[kLanes];
};

}  // namespace
}  // namespace kbitq::KBITQ_ISA
