// The tile order: the bits of the planes (format/block.h), moved once at load to where the matmul kernels want them.
// It is not part of the file format: a file never holds it, and repack (ops/repack.h) inverts it exactly.
//
// A record is 16 rows x 256 columns (8 blocks): K * 128 words of indices, then 32 words of scale bytes, contiguous, so
// a warp streams one with K + 1 coalesced loads. Records lie row tile by row tile, chunk by chunk:
// [ceil(rows/16)][chunks]. Rows and blocks past the matrix's end are zeros: scale byte 0, which decodes to 0.
//
// Who owns what. The weights are the 16-row operand of mma.m16n8k16, so lane = 4*(row % 8) + t holds rows g = lane / 4
// and g + 8. The order of k is free if the activations follow it: of each block of 32, lane t takes elements 8t ..
// 8t+7, which are one 16-byte load of activations and two k-steps of weights:
//
//     elements of a block    |  0..7  (t = 0) |  8..15 (t = 1) | 16..23 (t = 2) | 24..31 (t = 3) |
//     of a lane              | 0 1 | 2 3 | 4 5 | 6 7 |
//                              k-step 0  |  k-step 1
//     registers of a k-step    a0 = row g, first two    a1 = row g + 8, first two
//                              a2 = row g, last two     a3 = row g + 8, last two
//
// A lane has 32 weights of each 64 columns (a subtile: two blocks), which are K words. They are laid out so that one
// byte (or a field of ten bits) is the table index of two or four weights, and for K = 2 and 3 so that four half bytes,
// masked, are the selectors of a byte permute as well. Pair p = 8*block + 4*k-step + register has weights e0 (even k)
// and e1; most significant bit first:
//
//     K = 4   pair p: word p / 4, byte p % 4                  [ e1 e1 e1 e1 | e0 e0 e0 e0 ]
//
//     K = 3   pair p < 12: word p / 4, byte p % 4             [ y  e1 e1 e1 | x  e0 e0 e0 ]
//             x and y of byte j of word b: bit b of the two weights of pair 12 + j
//
//     K = 2   pairs p and p + 1: word p / 8, byte p % 8 / 2   [ f1 f1 e1 e1 | f0 f0 e0 e0 ]   f: of pair p + 1
//
//     K = 5   pair p < 15: word p / 3, field p % 3            bits 7..16, 17..26 and 27..31 with 0..4: [ e1 | e0 ]
//             bits 5 and 6 of word j: bits 2j and 2j + 1 of pair 15. Bit 7 is where the address in a table of 128-byte
//             rows wants an index
//
// Word n = subtile*K + word of a lane is component n % 4 of its 16-byte load n / 4. The scale bytes of rows g and g + 8
// for blocks 2j and 2j + 1 are word 4*g + j: [ (g+8, 2j+1) | (g+8, 2j) | (g, 2j+1) | (g, 2j) ].
#pragma once

#include <cstdint>

#include "format/block.h"

namespace kbitq {

constexpr int kTileRows = 16;   // of a record: the rows of an mma operand
constexpr int kTileBlocks = 8;  // its blocks of columns
constexpr int kTileCols = kTileBlocks * kBlock;
constexpr int kTileMaxBits = 5;  // wider indices have no tile order
constexpr int kTileScaleWords = kTileRows * kTileBlocks / 4;

KBITQ_HD constexpr int64_t row_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
KBITQ_HD constexpr int64_t tile_chunks(int64_t cols) { return (cols + kTileCols - 1) / kTileCols; }
KBITQ_HD constexpr int tile_index_words(int k) { return k * kTileRows * kTileCols / 32; }
KBITQ_HD constexpr int tile_words(int k) { return tile_index_words(k) + kTileScaleWords; }

// A bit of a record: its word and its place there.
struct TileBit {
    int word, shift;
};

// Where bit `bit` of the index at (row, col) of a record lies; 0 <= row < 16, 0 <= col < 256.
KBITQ_HD TileBit tile_bit(int k, int row, int col, int bit) {
    const int lane = (row % 8) * 4 + (col % kBlock) / 8;
    const int half = row / 8, block = (col / kBlock) % 2, element = col % 8, step = element / 4;
    const int pair = block * 8 + step * 4 + half + 2 * (element % 4 / 2);
    const int odd = element % 2, field = odd * k + bit;  // the bit within its pair
    int word, shift;
    if (k == 2) {
        word = pair / 8;
        shift = 8 * (pair % 8 / 2) + 4 * odd + 2 * (pair % 2) + bit;
    } else if (k == 3 && pair >= 12) {
        word = bit;
        shift = 8 * (pair % 4) + 4 * odd + 3;
    } else if (k <= 4) {
        word = pair / 4;
        shift = 8 * (pair % 4) + 4 * odd + bit;
    } else if (pair < 15) {
        word = pair / 3;
        shift = (7 + 10 * (pair % 3) + field) % 32;
    } else {
        word = field / 2;
        shift = 5 + field % 2;
    }
    const int n = (col / 64) * k + word;
    return {n / 4 * 128 + lane * 4 + n % 4, shift};
}

// Where the scale byte of (row, block) of a record lies, as a byte of it.
KBITQ_HD int tile_scale_byte(int k, int row, int block) {
    return (tile_index_words(k) + (row % 8) * 4 + block / 2) * 4 + row / 8 * 2 + block % 2;
}

}  // namespace kbitq
