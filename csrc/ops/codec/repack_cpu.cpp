#include <cstring>

#include "codecs/planes_tiles.h"
#include "cpu/parallel.h"
#include "ops/codec/repack.h"

namespace kbitq {
namespace {

// Moves the K words of one block between a row of planes and its record.
void move_block(const RepackArgs& args, uint32_t* record, int row, int block, uint32_t* planes) {
    for (int bit = 0; bit < args.packed.k; ++bit) {
        uint32_t plane = args.inverse ? 0u : planes[bit];
        for (int i = 0; i < kBlock; ++i) {
            const TileBit at = tile_bit(args.packed.k, row, block * kBlock + i, bit);
            if (args.inverse) {
                plane |= ((record[at.word] >> at.shift) & 1u) << i;
            } else {
                record[at.word] |= ((plane >> i) & 1u) << at.shift;
            }
        }
        if (args.inverse) planes[bit] = plane;
    }
}

void move_record(const RepackArgs& args, int64_t tile, int64_t chunk) {
    const int64_t nblk = blocks_per_row(args.packed.cols);
    uint32_t* record = args.tiles + (tile * tile_chunks(args.packed.cols) + chunk) * tile_words(args.packed.k);
    if (!args.inverse) std::memset(record, 0, sizeof(uint32_t) * static_cast<size_t>(tile_words(args.packed.k)));
    uint8_t* bytes = reinterpret_cast<uint8_t*>(record);
    for (int row = 0; row < kTileRows; ++row) {
        const int64_t r = tile * kTileRows + row;
        for (int block = 0; block < kTileBlocks; ++block) {
            const int64_t b = chunk * kTileBlocks + block;
            if (r >= args.packed.rows || b >= nblk) continue;
            move_block(args, record, row, block, args.packed.words + (r * nblk + b) * args.packed.k);
            uint8_t& scale = bytes[tile_scale_byte(args.packed.k, row, block)];
            uint8_t& absmax = args.packed.scales[r * nblk + b];
            if (args.inverse) {
                absmax = scale;
            } else {
                scale = absmax;
            }
        }
    }
}

}  // namespace

void repack_cpu(const RepackArgs& args, int threads) {
    const int64_t chunks = tile_chunks(args.packed.cols);
    parallel_for(row_tiles(args.packed.rows), 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
            for (int64_t chunk = 0; chunk < chunks; ++chunk) move_record(args, tile, chunk);
        }
    });
}

}  // namespace kbitq
