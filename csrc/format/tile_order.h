// The tile order: the weights of a file, moved once at load to where the tiled kernels want them. It is not part of
// the file format: a file never holds it, and repack (ops/codec/repack.h) inverts it exactly.
//
// A record is 16 rows x 256 columns (8 blocks), contiguous, so that a warp streams one with few coalesced loads.
// Records lie row tile by row tile, chunk by chunk: [ceil(rows/16)][chunks]. Rows and blocks past the matrix's end are
// zeros: scale byte 0, which decodes to 0. Where a bit lies in a record is its codec's business (codecs/*_tiles.h);
// which lane owns which weight is the same for all:
//
// The weights are the 16-row operand of mma.m16n8k16, so lane = 4*(row % 8) + t holds rows g = lane / 4 and g + 8. The
// order of k is free if the activations follow it: of each block of 32, lane t takes elements 8t .. 8t+7, which are one
// 16-byte load of activations and two k-steps of weights:
//
//     elements of a block    |  0..7  (t = 0) |  8..15 (t = 1) | 16..23 (t = 2) | 24..31 (t = 3) |
//     of a lane              | 0 1 | 2 3 | 4 5 | 6 7 |
//                              k-step 0  |  k-step 1
//     registers of a k-step    a0 = row g, first two    a1 = row g + 8, first two
//                              a2 = row g, last two     a3 = row g + 8, last two
//
// A codec whose indices depend on all of a block gives lane t the whole of it instead, one block of four:
//
//     units                  parts of blocks                 whole blocks
//     u = 0 .. 7 of a        elements 8t .. 8t+7             elements 8m .. 8m+7 of block 4j + t, m = u % 4, j = u / 4
//     record and lane        of block u
//
// A unit is eight neighbours, two k-steps. A subtile is two units, 64 columns of a record for the four lanes of a row:
// 32 weights of a lane, which are the a-operands of four k-steps in 16 registers, a[8 * unit + 4 * k-step + register].
#pragma once

#include <cstdint>

#include "format/block.h"

namespace kbitq {

constexpr int kTileRows = 16;   // of a record: the rows of an mma operand
constexpr int kTileBlocks = 8;  // its blocks of columns
constexpr int kTileCols = kTileBlocks * kBlock;
constexpr int kSubtiles = 4;  // of a record

// Which of the 32 groups of eight columns of a record is unit `unit` of lane t. With n for the result, also the
// inverse: group_of_unit(n / 4, n % 4) = unit * 4 + t.
template <bool WholeBlocks>
KBITQ_HD constexpr int group_of_unit(int unit, int t) {
    return WholeBlocks ? unit / 4 * 16 + t * 4 + unit % 4 : unit * 4 + t;
}

KBITQ_HD constexpr int64_t row_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
KBITQ_HD constexpr int64_t tile_chunks(int64_t cols) { return (cols + kTileCols - 1) / kTileCols; }

}  // namespace kbitq
