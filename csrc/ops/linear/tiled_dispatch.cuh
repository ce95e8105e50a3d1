// What the launchers of the kernels on tiles share: from a product's arguments to a kernel's template parameters.
#pragma once

#include <stdexcept>
#include <string>

#include "codecs/planes_tiles.cuh"
#include "codecs/trellis_tiles.cuh"
#include "cuda/launch.cuh"
#include "ops/linear/tiled.h"

namespace kbitq::tiled {

// The codecs of one list are compiled together: a list has a source for each kernel, tiled_<kernel>_<list>_cuda.cu.
template <class... Codecs>
struct CodecList {
    // Calls run(codec) for the one that reads this matrix; false if none does.
    template <typename Run>
    static bool find(const PackedMatrix& matrix, Run&& run) {
        return ((Codecs::kCodec == matrix.codec && Codecs::kBits == matrix.k &&
                 Codecs::kScaleBlocks == matrix.scale_blocks && (run(Codecs{}), true)) ||
                ...);
    }
    static bool reads(const PackedMatrix& matrix) {
        return find(matrix, [](auto) {});
    }
};

using PlanesCodecs = CodecList<PlanesTiles<2>, PlanesTiles<3>, PlanesTiles<4>, PlanesTiles<5>>;
using TrellisCodecs = CodecList<TrellisTiles<1, 1>, TrellisTiles<2, 1>, TrellisTiles<3, 1>, TrellisTiles<4, 1>>;
using WideTrellisCodecs = CodecList<TrellisTiles<1, kWideScaleBlocks>, TrellisTiles<2, kWideScaleBlocks>,
                                    TrellisTiles<3, kWideScaleBlocks>, TrellisTiles<4, kWideScaleBlocks>>;
using OneCodec = PlanesTiles<2>;  // where the answer is the same for all

// Calls run(list) for the list of codecs that has the one of a matrix. A new list is added here, and nowhere else.
template <typename Run>
void with_codecs(const char* op, const PackedMatrix& matrix, Run&& run) {
    if (PlanesCodecs::reads(matrix)) return run(PlanesCodecs{});
    if (TrellisCodecs::reads(matrix)) return run(TrellisCodecs{});
    if (WideTrellisCodecs::reads(matrix)) return run(WideTrellisCodecs{});
    throw std::runtime_error(std::string(op) + ": this codec has no tiles at K=" + std::to_string(matrix.k));
}

// Calls run(Element<T>, codec) for the type of x and the codec of the tiles, if it is in the list.
template <class Codecs, typename Run>
void with_instance(const TiledLinearArgs& args, Run&& run) {
    Codecs::find(args.weight,
                 [&](auto codec) { with_dtype_of_16_bits(args.dtype, [&](auto element) { run(element, codec); }); });
}

// Can rows of x be read 16 bytes at a time?
inline bool rows_in_vectors(const TiledLinearArgs& args) {
    return args.weight.cols % 8 == 0 && all_aligned16({args.x});
}

}  // namespace kbitq::tiled
