// The codec `planes`, one element at a time: it reads as format.md section 3 does, and is what the vector kernels are
// held against.
#pragma once

#include "codecs/block_scalar.h"
#include "codecs/planes_encode_tables.h"
#include "format/scale_e4m4.h"

namespace kbitq {
namespace {

class PlanesScalar {
  public:
    explicit PlanesScalar(int k) : k_(k) {}
    int words() const { return k_; }

    void decode_block(float (&level)[kBlock], const uint32_t* words, const float* codebook) const {
        with_bits(k_, [&](auto bits) {
            for (int i = 0; i < kBlock; ++i) {
                uint32_t index = 0;
                for (int j = 0; j < bits; ++j) index |= (words[j] >> i & 1u) << j;
                level[i] = codebook[index];
            }
        });
    }

    void encode(const EncodeTables& tables, const SourceBlock* block, int, ScaleRule rule, uint32_t* words,
                uint8_t* scale) const {
        const SourceBlock& b = *block;
        const auto& t = static_cast<const PlanesTables&>(tables);
        float s = b.most;
        if (rule != ScaleRule::exact) {
            const int byte = s == 0.0f ? 0 : choose_byte(t, b, rule);
            *scale = static_cast<uint8_t>(byte);
            s = decode_e4m4(byte);
        }
        uint32_t plane[kMaxBits] = {};
        for (int i = 0; i < kBlock; ++i) {
            const int index = i < b.length ? nearest(t, b.v[i], s) : t.zero;
            for (int j = 0; j < k_; ++j) plane[j] |= static_cast<uint32_t>((index >> j) & 1) << i;
        }
        for (int j = 0; j < k_; ++j) words[j] = plane[j];
    }

  private:
    int nearest(const PlanesTables& t, float v, float s) const {
        if (s == 0.0f) return t.zero;
        int index = 0;
        with_bits(k_, [&](auto bits) { index = nearest_index<bits>(t.mid, v, s); });
        return index;
    }

    float error_of(const PlanesTables& t, const SourceBlock& b, float s) const {
        float e[kBlock] = {};
        for (int i = 0; i < b.length; ++i) {
            const float d = b.v[i] - t.levels[nearest(t, b.v[i], s)] * s;
            e[i] = (d * d) * b.weight[i];
        }
        return tree_sum(e);
    }

    int choose_byte(const PlanesTables& t, const SourceBlock& b, ScaleRule rule) const {
        const int base = static_cast<int>(encode_e4m4(b.most));
        if (rule == ScaleRule::absmax) return clip_byte(t, base);
        return least_error_byte(
            candidate_count(k_),
            [&](int n) { return clip_byte(t, base + first_candidate(k_) + n * candidate_step(k_)); },
            [&](int byte) { return error_of(t, b, decode_e4m4(byte)); });
    }

    int k_;
};

}  // namespace
}  // namespace kbitq
