// How repack moves a block into and out of a record, for each codec with a tile order.
#pragma once

#include "codecs/packed_matrix.h"
#include "codecs/planes_tiles.h"
#include "codecs/trellis_tiles.h"

namespace kbitq {

// Words of a record.
KBITQ_HD constexpr int record_words(Codec codec, int k, int scale_blocks) {
    return codec == Codec::trellis ? trellis_tile_words(k, scale_blocks) : tile_words(k);
}

// Where the scale byte of (row, block) of a record lies, as a byte of it; blocks that share a scale share the byte.
KBITQ_HD int record_scale_byte(Codec codec, int k, int scale_blocks, int row, int block) {
    return codec == Codec::trellis ? trellis_tile_scale_byte(k, scale_blocks, row, block)
                                   : tile_scale_byte(k, row, block);
}

// Brings the K words of one block of a file to its record, which holds zeros in their place. Or: sets bits of a word,
// or(word, bits); several blocks may share a word.
template <typename Or>
KBITQ_HD void put_block(Codec codec, int k, const uint32_t* words, uint32_t* record, int row, int block, Or&& set) {
    if (codec == Codec::trellis) {
        uint32_t moved[kTrellisMaxBits];
        to_tile_block(k, words, moved);
        for (int i = 0; i < k; ++i) record[trellis_tile_word(k, row, block, i)] = moved[i];
        return;
    }
    for (int bit = 0; bit < k; ++bit) {
        for (int i = 0; i < kBlock; ++i) {
            const TileBit at = tile_bit(k, row, block * kBlock + i, bit);
            if (words[bit] >> i & 1u) set(record[at.word], 1u << at.shift);
        }
    }
}

// The inverse.
KBITQ_HD void take_block(Codec codec, int k, const uint32_t* record, int row, int block, uint32_t* words) {
    if (codec == Codec::trellis) {
        uint32_t moved[kTrellisMaxBits];
        for (int i = 0; i < k; ++i) moved[i] = record[trellis_tile_word(k, row, block, i)];
        return from_tile_block(k, moved, words);
    }
    for (int bit = 0; bit < k; ++bit) {
        uint32_t plane = 0;
        for (int i = 0; i < kBlock; ++i) {
            const TileBit at = tile_bit(k, row, block * kBlock + i, bit);
            plane |= (record[at.word] >> at.shift & 1u) << i;
        }
        words[bit] = plane;
    }
}

}  // namespace kbitq
