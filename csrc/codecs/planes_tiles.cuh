// Planes in tile order, as the tiled kernels see them. The kernels (ops/linear/tiled_*.cuh) are templates on a decoder;
// everything that depends on how a weight is coded is a member of a codec or of its decoders. A kernel asks for
//
//     Codec     kCodec, kBits, kScaleBlocks                 which matrices it reads
//               Few, FewSmaller, Many, Sm90                 the decoder of each kernel, for a type of activations
//               Floats                                      to exact float32 values (codecs/planes_floats.cuh)
//
//     Decoder   kRecordBytes, kTableBytes, kWords           bytes of a record and of the table; registers of a lane
//               kWholeBlocks                                which weights a lane has (format/tile_order.h)
//               copy_record, load_words, scales_offset      a record from global to shared memory, and to registers
//               load_level, normalise, fill_table           what comes before the first decoding
//               decode                                      a subtile to registers of an mma operand
//               load_scale(s), scale_weights                scales, for kernels that scale weights
//               scales_of_subtile, scales_of_block          scales, for kernels that scale sums
//
// How a codebook is normalised, and sums brought back, is the same for all codecs (codecs/tile_levels.cuh). Another
// codec is a header like this one, a list in ops/linear/tiled_dispatch.cuh with its three sources, and its order in
// repack.
#pragma once

#include "codecs/packed_matrix.h"
#include "codecs/planes_floats.cuh"
#include "codecs/planes_table.cuh"
#include "codecs/scale_e4m4.cuh"
#include "codecs/tile_levels.cuh"

namespace kbitq::tiled {

// Table: a PlanesTable. The object is what a lane keeps in registers to decode.
template <class Table>
class PlanesDecoder : public Table {
    static constexpr int K = Table::kBits;

  public:
    static constexpr int kWords = 4 * K;  // of a lane in a record

    // --- a record ---

    // Copies one record, 16 bytes a lane at a time; `from` and `to` are this lane's.
    static __device__ __forceinline__ void copy_record(uint32_t to, const uint8_t* from) {
#pragma unroll
        for (int j = 0; j < K; ++j) copy_async_16(to + j * 512, from + j * 512);
        if (threadIdx.x % 32 < kTileScaleWords / 4) {
            copy_async_16(to + Table::kScaleOffset, from + Table::kScaleOffset);
        }
    }

    // The words of a lane; `own` is the shared address of its first.
    static __device__ __forceinline__ void load_words(uint32_t own, uint32_t (&w)[kWords]) {
#pragma unroll
        for (int j = 0; j < K; ++j) {
            const uint4 v = load_record_128(own + j * 512);
            w[4 * j] = v.x, w[4 * j + 1] = v.y, w[4 * j + 2] = v.z, w[4 * j + 3] = v.w;
        }
    }

    // From the address of a lane's first word to that of the scales of its rows, a word of four bytes for each subtile.
    static __device__ __forceinline__ int scales_offset() {
        const int lane = threadIdx.x % 32;
        return Table::kScaleOffset + lane / 4 * 16 - lane * 16;
    }

    // --- before the first decoding ---

    static __device__ __forceinline__ float load_level(const float* codebook, int group) {
        return tiled::load_level<Table::kLevels>(codebook + group * Table::kLevels);
    }

    template <typename T, bool ScaledWeights>
    static __device__ __forceinline__ uint32_t normalise(float level, int& taken) {
        return normalised_level<T, Table::kLevels>(level, taken, ScaledWeights ? PlacedScale<T>::kLift : 0);
    }

    static __device__ __forceinline__ void fill_table(uint32_t level, int warp, int warps) {
        tiled::fill_table<Table>(level, warp, warps);
    }

    __device__ __forceinline__ explicit PlanesDecoder(uint32_t level) : own_(own_copy<Table>()), bytes_(level) {}

    // --- weights and their scales ---

    // Subtile s of the words that load_words has brought.
    __device__ __forceinline__ void decode(const uint32_t (&w)[kWords], int s, uint32_t (&a)[16]) const {
        if constexpr (Table::kInRegisters > 0) {
            if (s >= kSubtiles - Table::kInRegisters) return decode_by_permutes<K>(w + s * K, bytes_, a);
        }
        decode_by_table<Table>(w + s * K, own_, a);
    }

    // The scales of subtile s, and of all four; `scales`: the address that scales_offset leads to.
    static __device__ __forceinline__ uint32_t load_scale(uint32_t scales, int s) {
        return load_record_32(scales + 4 * s);
    }
    static __device__ __forceinline__ void load_scales(uint32_t scales, uint32_t (&word)[kSubtiles]) {
        const uint4 v = load_record_128(scales);
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }

    // A decoded subtile times its scales, for kernels that called normalise with ScaledWeights.
    template <typename T>
    static __device__ __forceinline__ void scale_weights(uint32_t scale, uint32_t (&a)[16]) {
        tiled::scale_weights<T>(scale, a);
    }

    // The scales of the even and of the odd block of subtile s, for kernels that scale sums.
    static __device__ __forceinline__ void scales_of_subtile(uint32_t scales, int s, RowScales& even, RowScales& odd) {
        const uint32_t word = load_scale(scales, s);
        even.low = scale_of_byte(word, 0), odd.low = scale_of_byte(word, 1);
        even.high = scale_of_byte(word, 2), odd.high = scale_of_byte(word, 3);
    }
    static __device__ __forceinline__ RowScales scales_of_block(uint32_t scales, int block) {
        const uint32_t word = load_record_32(scales + block / 2 * 4) >> (8 * (block % 2));
        return {scale_of_byte(word, 0), scale_of_byte(word, 2)};
    }

  private:
    uint32_t own_;  // own_copy
    LevelBytes<K, (Table::kInRegisters > 0)> bytes_;
};

// The codec: which decoder each kernel uses.
template <int K>
struct PlanesTiles {
    static constexpr Codec kCodec = Codec::planes;
    static constexpr int kBits = K;
    static constexpr int kScaleBlocks = 1;
    static constexpr bool kWholeBlocks = false;
    template <typename T, int Rows>
    using Few = PlanesDecoder<PlanesFew<K, Rows>>;
    template <typename T, int Rows>
    using FewSmaller = PlanesDecoder<PlanesFewSmaller<K, Rows>>;
    template <typename T>
    using Many = PlanesDecoder<PlanesMany<K>>;
    template <typename T, int Rows>
    using Sm90 = PlanesDecoder<PlanesSm90<K, Rows>>;
    using Floats = PlanesFloats<K>;
};

}  // namespace kbitq::tiled
