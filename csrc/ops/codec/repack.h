// repack: between the planes of a file and the tiles that the matmul kernels read (format/tile_order.h), both ways.
#pragma once

#include <cstdint>

#include "format/block.h"

namespace kbitq {

struct RepackArgs {
    int32_t* packed;  // [rows, nblk * k]
    uint8_t* absmax;  // [rows, nblk]
    uint32_t* tiles;  // [row_tiles(rows)][tile_chunks(cols)][tile_words(k)]
    int64_t rows, cols;
    int k;         // 2..kTileMaxBits
    bool inverse;  // false: tiles from packed and absmax; true: these from tiles
};

void repack_cpu(const RepackArgs& args, int threads);
void repack_cuda(const RepackArgs& args, int device, void* stream);

}  // namespace kbitq
