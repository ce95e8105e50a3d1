#include "bindings/packed_args.h"

#include "codecs/tile_records.h"
#include "format/block.h"

namespace kbitq {
namespace {

// K of a codebook argument with 2^K levels along its last dimension; of the trellis, 2^(K + 2).
int bits_of(const TensorView& codebook, Codec codec) {
    const int64_t levels = codebook.size(codebook.rank() - 1);
    const bool trellis = codec == Codec::trellis;
    const int least = trellis ? kTrellisMinBits : kMinBits, most = trellis ? kTrellisMaxBits : kMaxBits;
    const int extra = trellis ? kTrellisExtraBits : 0;
    for (int k = least; k <= most; ++k) {
        if (levels == (int64_t{1} << (k + extra))) return k;
    }
    throw py::value_error("codebook: has " + std::to_string(levels) + " levels, needs 2^" +
                          (trellis ? "(K + 2)" : "K") + " with K from " + std::to_string(least) + " to " +
                          std::to_string(most));
}

// The K that have tiles.
struct TileBits {
    int least, most;
};

TileBits tile_bits(Codec codec) {
    return codec == Codec::trellis ? TileBits{kTrellisMinBits, kTrellisMaxBits} : TileBits{kMinBits, kTileMaxBits};
}

}  // namespace

PackedArgs::PackedArgs(int64_t rows, int64_t cols, int device, const std::string& codec) : device_(device) {
    if (codec == "planes") {
        view_.codec = Codec::planes;
        view_.scale_blocks = 1;
    } else if (codec == "trellis" || codec == "trellis/128") {
        view_.codec = Codec::trellis;
        view_.scale_blocks = codec == "trellis" ? 1 : kWideScaleBlocks;
    } else {
        throw py::value_error("codec: must be 'planes', 'trellis' or 'trellis/128', got '" + codec + "'");
    }
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
    return bits(bits_of(codebook, view_.codec));
}

PackedArgs& PackedArgs::bits(int k) {
    view_.k = k;
    return *this;
}

PackedArgs& PackedArgs::planes(TensorView& packed, TensorView& absmax, bool allow_float) {
    const int64_t nblk = blocks_per_row(view_.cols);
    packed.is(Element::i32).shaped({view_.rows, nblk * view_.k}).on(device_);
    view_.words = packed.data<uint32_t>();
    if (allow_float && view_.codec == Codec::planes && absmax.element() == Element::f32) {
        view_.float_scales = absmax.data<float>();
    } else {
        view_.scales = absmax.is(Element::u8).data<uint8_t>();
    }
    absmax.shaped({view_.rows, scales_per_row(view_)}).on(device_);
    return *this;
}

int PackedArgs::words_of_record() const {
    const TileBits k = tile_bits(view_.codec);
    if (view_.k < k.least || view_.k > k.most) {
        throw py::value_error("k: tiles have " + std::to_string(k.least) + " to " + std::to_string(k.most) +
                              " bits, got " + std::to_string(view_.k));
    }
    return record_words(view_.codec, view_.k, view_.scale_blocks);
}

PackedArgs& PackedArgs::bits_of_tiles(const TensorView& tiles) {
    const TileBits k = tile_bits(view_.codec);
    for (view_.k = k.least; view_.k <= k.most; ++view_.k) {
        if (tiles.size(2) == words_of_record()) return *this;
    }
    throw py::value_error("tiles: records of " + std::to_string(tiles.size(2)) + " words belong to no K from " +
                          std::to_string(k.least) + " to " + std::to_string(k.most));
}

PackedArgs& PackedArgs::tiles(TensorView& tiles) {
    tiles.is(Element::i32).shaped({row_tiles(view_.rows), tile_chunks(view_.cols), words_of_record()}).on(device_);
    view_.words = tiles.data<uint32_t>();
    return *this;
}

}  // namespace kbitq
