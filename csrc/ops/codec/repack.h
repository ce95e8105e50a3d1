// repack: between the words of a file and the tiles that the tiled kernels read (format/tile_order.h), both ways.
#pragma once

#include <cstdint>

#include "codecs/packed_matrix.h"

namespace kbitq {

struct RepackArgs {
    PackedOutput packed;  // in the order of rows, E4M4 scales; a codec and k that have tiles; without a codebook
    uint32_t* tiles;      // the same matrix in the order of tiles
    bool inverse;         // false: tiles from packed; true: packed from tiles
};

void repack_cpu(const RepackArgs& args, int threads);
void repack_cuda(const RepackArgs& args, int device, void* stream);

}  // namespace kbitq
