// Encoding of the codec `trellis` on the GPU: a thread owns a block, under one scale. It keeps the least errors of the
// 64 states in registers; the errors of the classes lie in shared memory, 1 KB a block.
//
// Two states that differ in their oldest bit lead to two that differ in their newest (codecs/trellis_encode_simd.h has
// the picture), so a step can leave its results where its operands were. Then the registers' numbers are rotated by one
// bit more with every step, and after six steps they are the states again:
//
//     register of state x    after n steps forward: x rotated right by n      backward: left by n     (6 bits)
#pragma once

#include "format/block.h"
#include "format/trellis.h"

namespace kbitq {
namespace {

constexpr int kBlockSlots = 2 * kBlock;  // of 16 bytes, which a block has in shared memory
constexpr int kWarpSlots = 32 * kBlockSlots;

// The register of a state after n steps forward, or -n backward.
KBITQ_HD constexpr int register_of(int state, int n) {
    const int by = ((n % kPathBits) + kPathBits) % kPathBits;
    return (state >> by | state << (kPathBits - by)) % kStates;
}

// A thread's part of the shared memory of its warp: for each element the errors of classes 0 to 3, and of 4 to 7. What
// is not needed any more, or not yet, gives its place to other things.
class TrellisSlots {
  public:
    __device__ __forceinline__ explicit TrellisSlots(float4* of_warp) : p_(of_warp + (threadIdx.x & 31)) {}

    __device__ __forceinline__ void put_errors(int i, int half, const float (&e)[4]) {
        slot(2 * i + half) = make_float4(e[0], e[1], e[2], e[3]);
    }
    __device__ __forceinline__ void get_errors(int i, float (&e)[kClasses]) const {
        const float4 low = slot(2 * i), high = slot(2 * i + 1);
        e[0] = low.x, e[1] = low.y, e[2] = low.z, e[3] = low.w;
        e[4] = high.x, e[5] = high.y, e[6] = high.z, e[7] = high.w;
    }

    // The element and its weight, where the errors of classes 4 to 7 come.
    __device__ __forceinline__ void put_element(int i, float v, float weight) {
        *reinterpret_cast<float2*>(&slot(2 * i + 1)) = make_float2(v, weight);
    }
    __device__ __forceinline__ float2 get_element(int i) const {
        return *reinterpret_cast<const float2*>(&slot(2 * i + 1));
    }

    // Which states were reached from the upper of their two, where the errors of classes 0 to 3 were. Bit s of `x` is
    // of state 2s, of `y` of state 2s + 1.
    __device__ __forceinline__ void put_from_upper(int i, uint2 bits) {
        *reinterpret_cast<uint2*>(&slot(2 * i)) = bits;
    }
    __device__ __forceinline__ uint2 get_from_upper(int i) const {
        return *reinterpret_cast<const uint2*>(&slot(2 * i));
    }

  private:
    __device__ __forceinline__ float4& slot(int number) { return p_[32 * number]; }
    __device__ __forceinline__ const float4& slot(int number) const { return p_[32 * number]; }

    float4* p_;
};

// Error of an element against a level times the scale.
template <bool kWeighted>
__device__ __forceinline__ float level_error(float2 element, float level) {
    const float d = element.x - level;
    return kWeighted ? (d * d) * element.y : d * d;
}

// From the elements in the slots to the errors of their nearest levels of each class. `levels`: in shared memory.
template <int K, bool kWeighted>
__device__ __forceinline__ void measure_classes(TrellisSlots& slots, const float* levels, float s) {
    constexpr int kOfClass = levels_of_class(K), kHalf = kClasses / 2;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        float scaled[kOfClass][kHalf];
#pragma unroll
        for (int j = 0; j < kOfClass; ++j) {
#pragma unroll
            for (int z = 0; z < kHalf; ++z) scaled[j][z] = levels[kClasses * j + kHalf * half + z] * s;
        }
#pragma unroll 4
        for (int i = 0; i < kBlock; ++i) {
            const float2 element = slots.get_element(i);
            float least[kHalf];
#pragma unroll
            for (int z = 0; z < kHalf; ++z) {
                least[z] = level_error<kWeighted>(element, scaled[0][z]);
#pragma unroll
                for (int j = 1; j < kOfClass; ++j)
                    least[z] = fminf(least[z], level_error<kWeighted>(element, scaled[j][z]));
            }
            slots.put_errors(i, half, least);
        }
    }
}

// Element i forward, as step `n` modulo 6 of a lap. kTrace: notes where each state was best reached from.
template <int n, bool kTrace>
__device__ __forceinline__ void step_forward(float (&metric)[kStates], TrellisSlots& slots, int i) {
    float e[kClasses];
    uint2 from_upper = {0, 0};
    slots.get_errors(i, e);
#pragma unroll
    for (int s = kStates / 2 - 1; s >= 0; --s) {
        const int z = class_of_state(s);
        float &lower = metric[register_of(s, n)], &upper = metric[register_of(s + kStates / 2, n)];
        const float zero_lower = lower + e[z], zero_upper = upper + e[z ^ kOldestTurns];
        const float one_lower = lower + e[z ^ kAppendedTurns], one_upper = upper + e[z ^ kAppendedTurns ^ kOldestTurns];
        lower = fminf(zero_lower, zero_upper);
        upper = fminf(one_lower, one_upper);
        if constexpr (kTrace) {  // the sign of the difference; not set on a tie, nor where both are infinite
            from_upper.x = __funnelshift_l(__float_as_uint(zero_upper - zero_lower), from_upper.x, 1);
            from_upper.y = __funnelshift_l(__float_as_uint(one_upper - one_lower), from_upper.y, 1);
        }
    }
    if constexpr (kTrace) slots.put_from_upper(i, from_upper);
}

// Element i backward, as step `n` modulo 6.
template <int n>
__device__ __forceinline__ void step_back(float (&metric)[kStates], const TrellisSlots& slots, int i) {
    float e[kClasses];
    slots.get_errors(i, e);
#pragma unroll
    for (int s = 0; s < kStates / 2; ++s) {
        const int z = class_of_state(s);
        float &zero = metric[register_of(2 * s, -n)], &one = metric[register_of(2 * s + 1, -n)];
        const float lower = fminf(zero + e[z], one + e[z ^ kAppendedTurns]);
        const float upper = fminf(zero + e[z ^ kOldestTurns], one + e[z ^ kAppendedTurns ^ kOldestTurns]);
        zero = lower;
        one = upper;
    }
}

static_assert(kBlock % kPathBits == 2, "a lap ends after the second of six steps");

template <bool kTrace>
__device__ __forceinline__ void lap_forward(float (&metric)[kStates], TrellisSlots& slots) {
#pragma unroll 1
    for (int i = 0;; i += kPathBits) {
        step_forward<0, kTrace>(metric, slots, i);
        step_forward<1, kTrace>(metric, slots, i + 1);
        if (i + 2 == kBlock) break;
        step_forward<2, kTrace>(metric, slots, i + 2);
        step_forward<3, kTrace>(metric, slots, i + 3);
        step_forward<4, kTrace>(metric, slots, i + 4);
        step_forward<5, kTrace>(metric, slots, i + 5);
    }
}

__device__ __forceinline__ void lap_back(float (&metric)[kStates], const TrellisSlots& slots) {
#pragma unroll 1
    for (int i = kBlock - 1;; i -= kPathBits) {
        step_back<0>(metric, slots, i);
        step_back<1>(metric, slots, i - 1);
        if (i - 1 == 0) break;
        step_back<2>(metric, slots, i - 2);
        step_back<3>(metric, slots, i - 3);
        step_back<4>(metric, slots, i - 4);
        step_back<5>(metric, slots, i - 5);
    }
}

// The state of least error before and after it, the smallest on a tie.
__device__ __forceinline__ int best_start(const float (&before)[kStates], const float (&after)[kStates]) {
    float least = before[register_of(0, kBlock)] + after[register_of(0, -kBlock)];
    int best = 0;
#pragma unroll
    for (int s = 1; s < kStates; ++s) {
        const float sum = before[register_of(s, kBlock)] + after[register_of(s, -kBlock)];
        if (sum < least) {
            best = s;
            least = sum;
        }
    }
    return best;
}

// What a walk has before its first step.
__device__ __forceinline__ void begin_at(float (&metric)[kStates], int start) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) metric[s] = s == start ? 0.0f : INFINITY;
}

// The metric of a state after a lap.
__device__ __forceinline__ float metric_of(const float (&metric)[kStates], int state) {
    float found = 0.0f;
#pragma unroll
    for (int s = 0; s < kStates; ++s) found = s == state ? metric[register_of(s, kBlock)] : found;
    return found;
}

// The state through which the best walk goes that need not close, and the least error of a walk from it to itself. One
// loop has both laps forward, so that their code is there once. `closed`: the error is wanted.
struct Walk {
    int start;
    float error;
};

__device__ __forceinline__ Walk best_walk(TrellisSlots& slots, bool closed) {
    float metric[kStates];
    Walk walk = {0, 0.0f};
#pragma unroll
    for (int s = 0; s < kStates; ++s) metric[s] = 0.0f;
#pragma unroll 1
    for (bool closing = false;; closing = true) {
        lap_forward<false>(metric, slots);
        if (closing) {
            walk.error = metric_of(metric, walk.start);
            return walk;
        }
        float after[kStates];
#pragma unroll
        for (int s = 0; s < kStates; ++s) after[s] = 0.0f;
        lap_back(after, slots);
        walk.start = best_start(metric, after);
        if (!closed) return walk;
        begin_at(metric, walk.start);
    }
}

// The path of the best walk from a state to itself. The errors of classes 0 to 3 are lost.
__device__ __forceinline__ uint32_t best_path(TrellisSlots& slots, int start) {
    float metric[kStates];
    begin_at(metric, start);
    lap_forward<true>(metric, slots);
    uint32_t path = 0;
    int state = start;
#pragma unroll 4
    for (int i = kBlock - 1; i >= 0; --i) {
        const uint2 bits = slots.get_from_upper(i);
        const uint32_t from_upper = (state & 1 ? bits.y : bits.x) >> (state >> 1) & 1u;
        path |= static_cast<uint32_t>(state & 1) << ((i + 1) % kBlock);
        state = state >> 1 | static_cast<int>(from_upper) << (kPathBits - 1);
    }
    return path;
}

// The words of a block from its path; the elements are in the slots.
template <int K, bool kWeighted>
__device__ __forceinline__ void words_of_path(uint32_t (&words)[K], uint32_t path, const TrellisSlots& slots,
                                              const float* levels, float s) {
    words[0] = path;
#pragma unroll
    for (int j = 1; j < K; ++j) words[j] = 0;
    if constexpr (K > 1) {
        const uint32_t bit_1 = path_bit_1(path), bit_2 = path_bit_2(path);
#pragma unroll 4
        for (int i = 0; i < kBlock; ++i) {
            const uint32_t z = (path >> i & 1u) | (bit_1 >> i & 1u) << 1 | (bit_2 >> i & 1u) << 2;
            const float2 element = slots.get_element(i);
            float least = level_error<kWeighted>(element, levels[z] * s);
            uint32_t pick = 0;
#pragma unroll
            for (int j = 1; j < levels_of_class(K); ++j) {
                const float e = level_error<kWeighted>(element, levels[z + kClasses * j] * s);
                pick = e < least ? j : pick;
                least = fminf(least, e);
            }
#pragma unroll
            for (int j = 1; j < K; ++j) words[j] |= (pick >> (j - 1) & 1u) << i;
        }
    }
}

}  // namespace
}  // namespace kbitq
