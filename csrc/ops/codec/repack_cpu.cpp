#include <cstring>

#include "codecs/tile_records.h"
#include "cpu/parallel.h"
#include "ops/codec/repack.h"

namespace kbitq {
namespace {

void move_record(const RepackArgs& args, int64_t tile, int64_t chunk) {
    const PackedOutput& packed = args.packed;
    const int64_t nblk = blocks_per_row(packed.cols), scales = scales_per_row(packed);
    const int words = record_words(packed.codec, packed.k, packed.scale_blocks);
    uint32_t* record = args.tiles + (tile * tile_chunks(packed.cols) + chunk) * words;
    if (!args.inverse) std::memset(record, 0, sizeof(uint32_t) * static_cast<size_t>(words));
    uint8_t* bytes = reinterpret_cast<uint8_t*>(record);
    for (int row = 0; row < kTileRows; ++row) {
        const int64_t r = tile * kTileRows + row;
        for (int block = 0; block < kTileBlocks; ++block) {
            const int64_t b = chunk * kTileBlocks + block;
            if (r >= packed.rows || b >= nblk) continue;
            uint32_t* const planes = packed.words + (r * nblk + b) * packed.k;
            uint8_t& scale = bytes[record_scale_byte(packed.codec, packed.k, packed.scale_blocks, row, block)];
            uint8_t& absmax = packed.scales[r * scales + b / packed.scale_blocks];
            if (args.inverse) {
                take_block(packed.codec, packed.k, record, row, block, planes);
                absmax = scale;
            } else {
                put_block(packed.codec, packed.k, planes, record, row, block,
                          [](uint32_t& word, uint32_t bits) { word |= bits; });
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
