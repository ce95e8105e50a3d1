#include "bindings/packed_args.h"

#include "codecs/planes_tiles.h"
#include "format/block.h"

namespace kbitq {
namespace {

// K of a codebook argument with 2^K levels along its last dimension.
int bits_of(const TensorView& codebook) {
    const int64_t levels = codebook.size(codebook.rank() - 1);
    for (int k = kMinBits; k <= kMaxBits; ++k) {
        if (levels == (int64_t{1} << k)) return k;
    }
    throw py::value_error("codebook: has " + std::to_string(levels) + " levels, needs 2^K with K from 2 to 8");
}

}  // namespace

PackedArgs::PackedArgs(int64_t rows, int64_t cols, int device) : device_(device) {
    view_.codec = Codec::planes;
    view_.rows = rows;
    view_.cols = cols;
    view_.groups = 1;
}

PackedArgs& PackedArgs::codebook(TensorView& codebook, size_t rank) {
    codebook.is(Element::f32).of_rank(rank).on(device_);
    view_.codebook = codebook.data<float>();
    if (rank == 2) view_.groups = codebook.size(0);
    if (view_.groups < 1 || view_.rows % view_.groups)
        throw py::value_error("codebook: its groups must divide the rows of the matrix");
    return bits(bits_of(codebook));
}

PackedArgs& PackedArgs::bits(int k) {
    view_.k = k;
    return *this;
}

PackedArgs& PackedArgs::planes(TensorView& packed, TensorView& absmax, bool allow_float) {
    const int64_t nblk = blocks_per_row(view_.cols);
    packed.is(Element::i32).shaped({view_.rows, nblk * view_.k}).on(device_);
    view_.words = packed.data<uint32_t>();
    if (allow_float && absmax.element() == Element::f32) {
        view_.float_scales = absmax.data<float>();
    } else {
        view_.scales = absmax.is(Element::u8).data<uint8_t>();
    }
    absmax.shaped({view_.rows, nblk}).on(device_);
    return *this;
}

PackedArgs& PackedArgs::tiles(TensorView& tiles) {
    if (view_.k > kTileMaxBits)
        throw py::value_error("codebook: tiles have 2 to 5 bits, got " + std::to_string(view_.k));
    tiles.is(Element::i32).shaped({row_tiles(view_.rows), tile_chunks(view_.cols), tile_words(view_.k)}).on(device_);
    view_.words = tiles.data<uint32_t>();
    return *this;
}

int tile_bits(const TensorView& tiles) {
    for (int k = kMinBits; k <= kTileMaxBits; ++k) {
        if (tiles.size(2) == tile_words(k)) return k;
    }
    throw py::value_error("tiles: records of " + std::to_string(tiles.size(2)) + " words belong to no K from 2 to 5");
}

}  // namespace kbitq
