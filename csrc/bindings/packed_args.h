// The tensors of a packed matrix as arguments of a binding: checked and made into the view that the ops take.
#pragma once

#include <string>

#include "bindings/tensor_view.h"
#include "codecs/packed_matrix.h"

namespace kbitq {

// For a matrix of this size, on this device. Each step throws ValueError, which names the tensor that is wrong.
class PackedArgs {
  public:
    PackedArgs(int64_t rows, int64_t cols, int device, const std::string& codec = "planes");

    // k and groups follow from the codebook: [levels] (rank 1), or [groups, levels] (rank 2).
    PackedArgs& codebook(TensorView& codebook, size_t rank);
    PackedArgs& bits(int k);  // of a matrix without a codebook
    PackedArgs& bits_of_tiles(const TensorView& tiles);
    // The order of rows: packed int32 [rows, nblk * K] and absmax uint8 [rows, scales], or float32 where an op allows
    // it.
    PackedArgs& planes(TensorView& packed, TensorView& absmax, bool allow_float = false);
    // The order of tiles: int32 [row_tiles, tile_chunks, record_words(codec, K)].
    PackedArgs& tiles(TensorView& tiles);

    // Words of a record of tiles; throws where this codec has no tiles at this K.
    int words_of_record() const;

    const PackedOutput& writable() const { return view_; }
    PackedMatrix matrix() const { return read_only(view_); }

  private:
    PackedOutput view_{};
    int device_;
};

}  // namespace kbitq
