// Planes in tile order (format/tile_order.h): where a bit of an index lies in a record, and how many bytes the matmul
// kernels need for a record and for the table that decodes it. Device and host code plan shared memory with them.
//
// A record is K * 128 words of indices, then 32 words of scale bytes.
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
//             bits 5 and 6 of word j: bits 2j and 2j + 1 of pair 15. An index begins at bit 7, because the rows of its
//             table are 128 bytes apart
//
// Word n = subtile*K + word of a lane is component n % 4 of its 16-byte load n / 4. The scale bytes of rows g and g + 8
// for blocks 2j and 2j + 1 are word 4*g + j: [ (g+8, 2j+1) | (g+8, 2j) | (g, 2j+1) | (g, 2j) ].
#pragma once

#include <cstdint>

#include "format/tile_order.h"

namespace kbitq {

constexpr int kTileMaxBits = 5;  // wider indices have no tile order
constexpr int kTileScaleWords = kTileRows * kTileBlocks / 4;

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

namespace tiled {

template <int K>
struct PlanesRecord {
    static constexpr int kBits = K;
    static constexpr int kLevels = 1 << K;  // of a codebook
    static constexpr int kRecordBytes = tile_words(K) * 4;
    static constexpr int kScaleOffset = tile_index_words(K) * 4;  // bytes from the start of a record
    static constexpr bool kWholeBlocks = false;
};

// The table in shared memory by which a kernel decodes (codecs/planes_table.cuh draws it). Copies: of each entry.
// InRegisters: of the four subtiles of a record, the last so many are decoded by permutes of registers instead.
template <int K, int Copies = 32, int InRegisters = 0>
struct PlanesTable : PlanesRecord<K> {
    static_assert(Copies == 32 || (K == 5 && Copies == 16));
    static_assert(InRegisters == 0 || K <= 3);
    static constexpr int kCopies = Copies;
    static constexpr int kInRegisters = InRegisters;
    static constexpr int kQuad = K == 2;                                  // an entry is 4 weights, else 2
    static constexpr int kEntries = K == 3 ? 0x78 : K == 5 ? 1024 : 256;  // K = 3: an index is [ 0 e1 . . | 0 e0 . . ]
    static constexpr int kRowBytes = K == 5 ? 4 * Copies : 256;
    static constexpr int kTableBytes = kEntries * kRowBytes;
    static constexpr int kCopyBytes = kQuad ? 8 : 4;  // of an entry, for one lane
};

// The table of each kernel, as measured on an H200. Rows: of x, that an instance has room for.
template <int K, int Rows>
using PlanesFew = PlanesTable < K,
      K == 5 && Rows >= 8 ? 16 : 32, K == 2 && Rows<16 ? 1 : 0>;
template <int K, int Rows>  // for a card with less shared memory
using PlanesFewSmaller = PlanesTable < K,
      K == 5 ? 16 : 32, K == 2 && Rows<16 ? 1 : 0>;
template <int K>
using PlanesMany = PlanesTable<K, K == 5 ? 16 : 32, K <= 3 ? 1 : 0>;
// Integer units are scarce in this kernel, until wide operands of x take so much of the shared memory's bandwidth that
// the table's 8-byte entries of K = 2 are too much for it.
template <int K, int Rows>
using PlanesSm90 = PlanesTable<K, K == 5 ? 16 : 32, K == 2 && Rows >= 128 ? 1 : 0>;

}  // namespace tiled
}  // namespace kbitq
