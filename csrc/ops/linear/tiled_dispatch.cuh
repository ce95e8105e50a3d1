// What the launchers of the kernels on tiles share: from a product's arguments to a kernel's template parameters.
#pragma once

#include <stdexcept>
#include <string>

#include "codecs/planes_tiles.cuh"
#include "cuda/launch.cuh"
#include "ops/linear/tiled.h"

namespace kbitq::tiled {

template <class... Codecs>
struct CodecList {
    // Calls run(codec) for the one that reads this matrix; false if none does.
    template <typename Run>
    static bool find(const PackedMatrix& matrix, Run&& run) {
        return ((Codecs::kCodec == matrix.codec && Codecs::kBits == matrix.k && (run(Codecs{}), true)) || ...);
    }
};

// Every codec with tiles. A new one is added here, and nowhere else in ops/linear.
using TileCodecs = CodecList<PlanesTiles<2>, PlanesTiles<3>, PlanesTiles<4>, PlanesTiles<5>>;
using OneCodec = PlanesTiles<2>;  // where the answer is the same for all

// Calls run(codec) for the codec of a matrix.
template <typename Run>
void with_codec(const char* op, const PackedMatrix& matrix, Run&& run) {
    if (TileCodecs::find(matrix, run)) return;
    throw std::runtime_error(std::string(op) + ": this codec has no tiles at K=" + std::to_string(matrix.k));
}

// Calls run(Element<T>, codec) for the type of x and the codec of the tiles.
template <typename Run>
void with_instance(const char* op, const TiledLinearArgs& args, Run&& run) {
    with_codec(op, args.weight,
               [&](auto codec) { with_dtype_of_16_bits(args.dtype, [&](auto element) { run(element, codec); }); });
}

// Can rows of x be read 16 bytes at a time?
inline bool rows_in_vectors(const TiledLinearArgs& args) {
    return args.weight.cols % 8 == 0 && all_aligned16({args.x});
}

}  // namespace kbitq::tiled
