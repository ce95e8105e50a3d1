// THE format: the codec `trellis` (docs/format.md, "The codec trellis"). A block of 32 owns K words as in
// format/block.h, but an index has K + 2 bits: the two that are not stored are XORs of rotations of word 0, the path.
//
//     bit of index i     from                                              p: word 0, bit numbers modulo 32
//     0                  p[i]
//     1                  p[i-3] ^ p[i-5]
//     2                  p[i+1] ^ p[i-1] ^ p[i-2] ^ p[i-4] ^ p[i-5]
//     2 + j              word j, bit i              j = 1 .. K-1
//
// Read as a walk over the block: before element i the state is the six latest bits of the path, p[i] newest; the bit
// that is appended is p[i+1]. State and bit give the class (index bits 0 to 2) of element i:
//
//     state    p[i-5] p[i-4] p[i-3] p[i-2] p[i-1] p[i]      bits 5 .. 0 of a number
//     next     p[i-4] p[i-3] p[i-2] p[i-1] p[i]   p[i+1]
//
// so the state s goes to 2s or 2s + 1 modulo 64, and comes from s/2 or s/2 + 32. After 32 steps the walk is where it
// began: it is a circle.
#pragma once

#include <cstdint>

#include "format/block.h"

namespace kbitq {

constexpr int kTrellisMinBits = 1;
constexpr int kTrellisMaxBits = 4;
constexpr int kTrellisExtraBits = 2;  // of an index, which are not stored
constexpr int kPathBits = 6;
constexpr int kStates = 1 << kPathBits;
constexpr int kClassBits = 3;
constexpr int kClasses = 1 << kClassBits;
constexpr int kWideScaleBlocks = 4;  // blocks that share a scale, where one block has not its own

KBITQ_HD constexpr int trellis_levels(int k) { return 1 << (k + kTrellisExtraBits); }
KBITQ_HD constexpr int levels_of_class(int k) { return trellis_levels(k) / kClasses; }

KBITQ_HD constexpr uint32_t rotate_left(uint32_t x, int by) { return x << by | x >> (32 - by); }

KBITQ_HD constexpr uint32_t path_bit_1(uint32_t path) { return rotate_left(path, 3) ^ rotate_left(path, 5); }
KBITQ_HD constexpr uint32_t path_bit_2(uint32_t path) {
    return rotate_left(path, 31) ^ rotate_left(path, 1) ^ rotate_left(path, 2) ^ rotate_left(path, 4) ^
           rotate_left(path, 5);
}

// The K + 2 bits of 32 indices, as the planes of a codebook of 2^(K + 2) levels.
template <int K>
KBITQ_HD void expand_path(uint32_t (&planes)[K + kTrellisExtraBits], const uint32_t* words) {
    planes[0] = words[0];
    planes[1] = path_bit_1(words[0]);
    planes[2] = path_bit_2(words[0]);
    for (int j = 1; j < K; ++j) planes[kTrellisExtraBits + j] = words[j];
}

// The class of an element whose state is `state`, where the appended bit is 0. It has bit 2 turned over where that bit
// is 1; and bits 1 and 2 in state + 32.
KBITQ_HD constexpr int class_of_state(int state) {
    const int b0 = state & 1;
    const int b1 = (state >> 3 ^ state >> 5) & 1;
    const int b2 = (state >> 1 ^ state >> 2 ^ state >> 4 ^ state >> 5) & 1;
    return b2 << 2 | b1 << 1 | b0;
}
constexpr int kAppendedTurns = 4;  // bits of a class
constexpr int kOldestTurns = 6;

// The candidates of the `mse` rule, ascending: encode(max |v|) + trellis_candidate(k, scale_blocks, n).
constexpr int kTrellisCandidates = 6;
KBITQ_HD constexpr int trellis_candidate(int k, int scale_blocks, int n) {
    const bool wide = scale_blocks > 1;
    return k == 1   ? (wide ? -19 : -16) + 2 * n
           : k == 2 ? (wide ? -12 : -8) + 2 * n
           : k == 3 ? (wide ? -5 : -3) + n
                    : (wide ? -3 : -2) + n;
}

// Word j of a block whose scale decodes to 0: the top word is all ones, so that its levels are not negative.
KBITQ_HD constexpr uint32_t zero_block_word(int k, int j) { return j == k - 1 ? ~0u : 0u; }

template <typename Body>
static inline void with_trellis_bits(int k, Body&& body) {
    switch (k) {
        case 1: return body(std::integral_constant<int, 1>{});
        case 2: return body(std::integral_constant<int, 2>{});
        case 3: return body(std::integral_constant<int, 3>{});
        default: return body(std::integral_constant<int, 4>{});
    }
}

}  // namespace kbitq
