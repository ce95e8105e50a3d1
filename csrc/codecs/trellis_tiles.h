// The codec `trellis` in tile order (format/tile_order.h): where the K words of a block lie in a record, what becomes
// of them there, and how many bytes the matmul kernels need for a record and for the table that decodes it.
//
// A lane owns whole blocks, because two of an index's bits come from rotations of the whole path: of four neighbouring
// blocks, lane t of a row has block t. So a record of 16 rows x 8 blocks gives a lane four: block 4j + t of the rows g
// and g + 8, j = 0 and 1. Nothing is stored that a file does not hold: a block is K words in a record too.
//
//     record     words of blocks, then scale bytes
//     word n = (2j + half) * K + i of a lane       i-th word of its block; component n % 4 of its 16-byte load n / 4
//
//     scale bytes, a word of four      B = 32: for each lane; B = 128: for the four lanes of a row
//     [ (g+8, j=1) | (g+8, j=0) | (g, j=1) | (g, j=0) ]
//
// Weights are looked up by pairs of neighbours (K <= 3), by the path bits that the two depend on: for the pair at an
// even i these are p[i-5 .. i+2], a byte of the turned path
//
//     q[n] = p[n - 5]        word 0 of a block
//
// Flipping p[i-5], p[i-3] and p[i-1] together changes neither weight, nor does flipping p[i-4], p[i-2] and p[i+2]. So
// six bits say the classes of both: two of q, and four neighbours of
//
//     x = q ^ rotr(q, 2) ^ (rotr(q, 4) where n is odd)
//
// and two of the byte's bits are free for the next bits of the two indices. A byte of the table index, for K = 2 and 3:
//
//     bit     7            6       5       4            3   2   1   0
//             u of i+1     q       q       u of i       x   x   x   x          bit n of q and x, n = i .. i+7
//
//     K = 1   word 0: q, and its bytes are the index
//     K = 2   word 1: u, the upper bits of indices, where the byte wants them: of an even i at bit i + 4, of an odd i
//     at
//             bit i + 6
//     K = 3   word 1: the bits 3 of indices, likewise. Word 2: their bits 4, two neighbours for a pair, so that shifts
//             bring those of two pairs to where an address wants them (tile_pair_place)
//
// For K = 4 (64 levels, a weight at a time) an index is six neighbours of a byte that begins at bit n = i + 5:
//
//     bit     5         4         3         2            1            0
//             bit 5     bit 4     bit 3     bit 2        bit 1        bit 0, which is q
//
//             word 1: bits 3 of indices, turned by 8. Words 2 and 3: bits 4 and 5 of even and of odd elements
#pragma once

#include <cstdint>

#include "format/tile_order.h"
#include "format/trellis.h"

namespace kbitq {

constexpr int kTilePathTurn = 5;
constexpr uint32_t kEvenBits = 0x55555555u, kOddBits = 0xAAAAAAAAu;

KBITQ_HD constexpr uint32_t rotate_right(uint32_t x, int by) { return rotate_left(x, 32 - by); }

KBITQ_HD constexpr int trellis_tile_index_words(int k) { return k * kTileRows * kTileBlocks; }
KBITQ_HD constexpr int trellis_tile_words(int k, int scale_blocks) {
    return trellis_tile_index_words(k) + kTileRows * kTileBlocks / scale_blocks / 4;
}

// Where word i of the block (row, block) of a record lies; 0 <= row < 16, 0 <= block < 8.
KBITQ_HD constexpr int trellis_tile_word(int k, int row, int block, int i) {
    const int lane = row % 8 * 4 + block % 4, n = (block / 4 * 2 + row / 8) * k + i;
    return n / 4 * 128 + lane * 4 + n % 4;
}

// Where the scale byte of (row, block) of a record lies, as a byte of it.
KBITQ_HD constexpr int trellis_tile_scale_byte(int k, int scale_blocks, int row, int block) {
    const int word = scale_blocks == 1 ? row % 8 * 4 + block % 4 : row % 8;
    return (trellis_tile_index_words(k) + word) * 4 + row / 8 * 2 + block / 4;
}

// K = 3: the bit of word 2 for the even element of pair i / 2; the odd element's is the next one. Of the pairs i = 8m +
// 2j, a shift brings those of m = 0 and 1 (left by 2j), or of 2 and 3 (right by 2j + 2), to bits 7 and 23.
KBITQ_HD constexpr int tile_pair_place(int i) {
    const int m = i / 8, j = i % 8 / 2;
    return 1 + 2 * (m % 2 * 8 + (m / 2 ? 4 + j : 3 - j));
}

// The words of a block as they are in a record, from those of a file.
KBITQ_HD void to_tile_block(int k, const uint32_t* file, uint32_t* tile) {
    tile[0] = rotate_left(file[0], kTilePathTurn);
    if (k == 2 || k == 3) tile[1] = (rotate_left(file[1], 4) & kEvenBits) | (rotate_left(file[1], 6) & kOddBits);
    if (k == 3) {
        tile[2] = 0;
        for (int i = 0; i < kBlock; ++i) tile[2] |= (file[2] >> i & 1u) << (tile_pair_place(i) + i % 2) % 32;
    }
    if (k == 4) {
        const uint32_t bit_4 = rotate_left(file[2], 9), bit_5 = rotate_left(file[3], 10);
        tile[1] = rotate_left(file[1], 8);
        tile[2] = (bit_4 & kOddBits) | (bit_5 & kEvenBits);
        tile[3] = (bit_4 & kEvenBits) | (bit_5 & kOddBits);
    }
}

// The inverse.
KBITQ_HD void from_tile_block(int k, const uint32_t* tile, uint32_t* file) {
    file[0] = rotate_right(tile[0], kTilePathTurn);
    if (k == 2 || k == 3) file[1] = (rotate_right(tile[1], 4) & kEvenBits) | (rotate_right(tile[1], 6) & kOddBits);
    if (k == 3) {
        // tile_pair_place: bytes 0 and 2 have the pairs of m = 0 and 1 in reverse, 1 and 3 those of m = 2 and 3.
        const uint32_t pairs = rotate_right(tile[2], 1);
        const uint32_t reversed = (pairs & 0x00030003u) << 6 | (pairs & 0x000C000Cu) << 2 | (pairs >> 2 & 0x000C000Cu) |
                                  (pairs >> 6 & 0x00030003u);
        file[2] = (reversed & 0xFFu) | (reversed >> 8 & 0xFF00u) | (pairs << 8 & 0xFF0000u) | (pairs & 0xFF000000u);
    }
    if (k == 4) {
        file[1] = rotate_right(tile[1], 8);
        file[2] = (rotate_right(tile[2], 9) & kEvenBits) | (rotate_right(tile[3], 9) & kOddBits);
        file[3] = (rotate_right(tile[2], 10) & kEvenBits) | (rotate_right(tile[3], 10) & kOddBits);
    }
}

namespace tiled {

template <int K, int ScaleBlocks>
struct TrellisRecord {
    static constexpr int kBits = K;
    static constexpr int kLevels = trellis_levels(K);
    static constexpr int kScaleBlocks = ScaleBlocks;
    static constexpr int kRecordBytes = trellis_tile_words(K, ScaleBlocks) * 4;
    static constexpr int kScaleOffset = trellis_tile_index_words(K) * 4;  // bytes from the start of a record
    static constexpr bool kWholeBlocks = true;
};

// The table in shared memory by which a kernel decodes (codecs/trellis_table.cuh draws it). Copies: of each entry.
// Products: every other address is a sum of products instead of a byte permute.
template <int K, int ScaleBlocks, int Copies = 32, bool Products = false>
struct TrellisTable : TrellisRecord<K, ScaleBlocks> {
    static_assert(Copies == 32 || (K == 3 && Copies == 16));
    static constexpr int kCopies = Copies;
    static constexpr bool kProducts = Products;
    static constexpr int kEntries = K == 3 ? 1024 : 256;
    static constexpr int kRowBytes = K == 3 ? 4 * Copies : 256;
    static constexpr int kTableBytes = kEntries * kRowBytes;
};

// The table of each kernel, as measured on an H200. Rows: of x, that an instance has room for.
template <int K, int ScaleBlocks, int Rows>
using TrellisFew = TrellisTable<K, ScaleBlocks, K == 3 && Rows >= 16 ? 16 : 32, K != 3 && Rows <= 2>;
template <int K, int ScaleBlocks, int Rows>  // for a card with less shared memory
using TrellisFewSmaller = TrellisTable<K, ScaleBlocks, K == 3 ? 16 : 32, K != 3 && Rows <= 2>;
template <int K, int ScaleBlocks>
using TrellisMany = TrellisTable<K, ScaleBlocks, K == 3 ? 16 : 32>;

}  // namespace tiled
}  // namespace kbitq
