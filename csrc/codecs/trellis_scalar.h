// The codec `trellis`, one element at a time: it reads as format.md, "The codec trellis" does, and is what the vector
// kernels are held against.
#pragma once

#include "codecs/block_scalar.h"
#include "codecs/trellis_encode_tables.h"
#include "format/scale_e4m4.h"

namespace kbitq {
namespace {

// The search for the walk of least error over one block, under one scale.
class TrellisWalk {
  public:
    TrellisWalk(const TrellisTables& t, int k, const SourceBlock& b, float s) {
        for (int i = 0; i < kBlock; ++i) {
            for (int z = 0; z < kClasses; ++z) {
                least_[i][z] = __builtin_inff();
                for (int j = 0; j < levels_of_class(k); ++j) {
                    const float d = b.v[i] - t.levels[z + kClasses * j] * s;
                    const float e = (d * d) * b.weight[i];
                    if (e < least_[i][z]) {
                        least_[i][z] = e;
                        pick_[i][z] = static_cast<uint8_t>(j);
                    }
                }
            }
        }
        start_ = best_start();
        error_ = walk_from(start_);
    }

    float error() const { return error_; }

    void write(int k, uint32_t* words) const {
        uint32_t path = 0;
        for (int i = kBlock - 1, state = start_; i >= 0; --i) {
            path |= static_cast<uint32_t>(state & 1) << ((i + 1) % kBlock);
            state = state >> 1 | (from_upper_[i][state] ? kStates / 2 : 0);
        }
        words[0] = path;
        for (int j = 1; j < k; ++j) words[j] = 0;
        for (int i = 0; i < kBlock; ++i) {
            const int z = static_cast<int>((path >> i & 1u) | (path_bit_1(path) >> i & 1u) << 1 |
                                           (path_bit_2(path) >> i & 1u) << 2);
            for (int j = 1; j < k; ++j) words[j] |= (uint32_t{pick_[i][z]} >> (j - 1) & 1u) << i;
        }
    }

  private:
    // The state through which the best walk goes that need not close: the least error before it, over a lap from
    // anywhere, and after it.
    int best_start() const {
        float before[kStates] = {}, after[kStates] = {}, next[kStates];
        for (int i = 0; i < kBlock; ++i) {
            for (int s = 0; s < kStates; ++s) next[s] = lesser(arrive(before, i, s));
            for (int s = 0; s < kStates; ++s) before[s] = next[s];
        }
        for (int i = kBlock - 1; i >= 0; --i) {
            for (int s = 0; s < kStates; ++s) {
                const int z = class_of_state(s), to = 2 * s % kStates;
                const float zero = after[to] + least_[i][z], one = after[to + 1] + least_[i][z ^ kAppendedTurns];
                next[s] = one < zero ? one : zero;
            }
            for (int s = 0; s < kStates; ++s) after[s] = next[s];
        }
        int best = 0;
        for (int s = 1; s < kStates; ++s) {
            if (before[s] + after[s] < before[best] + after[best]) best = s;
        }
        return best;
    }

    // The least error of a lap from `start` to itself; notes where each state was best reached from.
    float walk_from(int start) {
        float metric[kStates], next[kStates];
        for (int s = 0; s < kStates; ++s) metric[s] = s == start ? 0.0f : __builtin_inff();
        for (int i = 0; i < kBlock; ++i) {
            for (int s = 0; s < kStates; ++s) {
                const Arrivals from = arrive(metric, i, s);
                from_upper_[i][s] = from.upper < from.lower;  // on a tie the smaller state
                next[s] = lesser(from);
            }
            for (int s = 0; s < kStates; ++s) metric[s] = next[s];
        }
        return metric[start];
    }

    struct Arrivals {
        float lower, upper;  // from state s / 2, and from s / 2 + 32
    };
    Arrivals arrive(const float (&metric)[kStates], int i, int s) const {
        const int from = s / 2, z = class_of_state(from) ^ (s % 2 ? kAppendedTurns : 0);
        return {metric[from] + least_[i][z], metric[from + kStates / 2] + least_[i][z ^ kOldestTurns]};
    }
    static float lesser(const Arrivals& a) { return a.upper < a.lower ? a.upper : a.lower; }

    float least_[kBlock][kClasses];   // error of the nearest level of a class
    uint8_t pick_[kBlock][kClasses];  // which of the class it is
    bool from_upper_[kBlock][kStates];
    int start_;
    float error_;
};

class TrellisScalar {
  public:
    explicit TrellisScalar(int k) : k_(k) {}
    int words() const { return k_; }

    void decode_block(float (&level)[kBlock], const uint32_t* words, const float* codebook) const {
        with_trellis_bits(k_, [&](auto k) {
            uint32_t plane[k + kTrellisExtraBits];
            expand_path<k>(plane, words);
            for (int i = 0; i < kBlock; ++i) {
                uint32_t index = 0;
                for (int j = 0; j < k + kTrellisExtraBits; ++j) index |= (plane[j] >> i & 1u) << j;
                level[i] = codebook[index];
            }
        });
    }

    // `count` blocks that share a scale.
    void encode(const EncodeTables& tables, const SourceBlock* blocks, int count, ScaleRule rule, uint32_t* words,
                uint8_t* scale) const {
        const auto& t = static_cast<const TrellisTables&>(tables);
        float most = 0.0f;
        for (int b = 0; b < count; ++b) most = blocks[b].most > most ? blocks[b].most : most;
        const bool given = rule == ScaleRule::given;
        const int byte = given ? *scale : most == 0.0f ? 0 : choose_byte(t, blocks, count, most, rule);
        *scale = static_cast<uint8_t>(byte);
        for (int b = 0; b < count; ++b, words += k_) {
            if (byte == 0) {
                for (int j = 0; j < k_; ++j) words[j] = zero_block_word(k_, j);
            } else {
                TrellisWalk(t, k_, blocks[b], decode_e4m4(byte)).write(k_, words);
            }
        }
    }

  private:
    int choose_byte(const TrellisTables& t, const SourceBlock* blocks, int count, float most, ScaleRule rule) const {
        const int base = static_cast<int>(encode_e4m4(most));
        if (rule == ScaleRule::absmax) return clip_byte(t, base);
        return least_error_byte(
            kTrellisCandidates, [&](int n) { return clip_byte(t, base + trellis_candidate(k_, t.scale_blocks, n)); },
            [&](int byte) {
                float error = 0.0f;
                for (int b = 0; b < count; ++b) error += TrellisWalk(t, k_, blocks[b], decode_e4m4(byte)).error();
                return error;
            });
    }

    int k_;
};

}  // namespace
}  // namespace kbitq
