// The codec `trellis` in tile order, as the tiled kernels see it: what codecs/planes_tiles.cuh lists. A decoded subtile
// is two units of eight neighbours of one block for each lane (format/tile_order.h, whole blocks), so all its weights
// in a row share a scale.
#pragma once

#include "codecs/packed_matrix.h"
#include "codecs/scale_e4m4.cuh"
#include "codecs/tile_levels.cuh"
#include "codecs/trellis_records.cuh"
#include "codecs/trellis_table.cuh"

namespace kbitq::tiled {

// Table: a TrellisTable. The object is what a lane keeps in registers to decode.
template <typename T, class Table>
class TrellisDecoder : public Table {
    static constexpr int K = Table::kBits;
    static constexpr int kScaleLanes = Table::kScaleBlocks == 1 ? 1 : 4;  // that share a word of scales

  public:
    static constexpr int kWords = 4 * K;  // of a lane in a record

    // --- a record ---

    static __device__ __forceinline__ void copy_record(uint32_t to, const uint8_t* from) {
#pragma unroll
        for (int j = 0; j < K; ++j) copy_async_16(to + j * 512, from + j * 512);
        if (threadIdx.x % 32 < 8 / kScaleLanes) copy_async_16(to + Table::kScaleOffset, from + Table::kScaleOffset);
    }

    static __device__ __forceinline__ void load_words(uint32_t own, uint32_t (&w)[kWords]) {
#pragma unroll
        for (int j = 0; j < K; ++j) {
            const uint4 v = load_record_128(own + j * 512);
            w[4 * j] = v.x, w[4 * j + 1] = v.y, w[4 * j + 2] = v.z, w[4 * j + 3] = v.w;
        }
    }

    // From the address of a lane's first word to that of the scales of its row, a word for each lane or for all four.
    static __device__ __forceinline__ int scales_offset() {
        const int lane = threadIdx.x % 32;
        return Table::kScaleOffset + lane / 4 * (16 / kScaleLanes) - lane * 16;
    }

    // --- before the first decoding ---

    static __device__ __forceinline__ auto load_level(const float* codebook, int group) {
        const float* const levels = codebook + group * Table::kLevels;
        if constexpr (Table::kLevels > 32) {
            return load_two_levels(levels);
        } else {
            return tiled::load_level<Table::kLevels>(levels);
        }
    }

    template <typename Element, bool ScaledWeights, typename Level>
    static __device__ __forceinline__ uint32_t normalise(Level level, int& taken) {
        return normalised_level<Element, Table::kLevels>(level, taken, ScaledWeights ? PlacedScale<Element>::kLift : 0);
    }

    static __device__ __forceinline__ void fill_table(uint32_t level, int warp, int warps) {
        fill_trellis_table<Table>(level, warp, warps);
    }

    __device__ __forceinline__ explicit TrellisDecoder(uint32_t)
        : own_(own_trellis_copy<Table>()),
          scale_pair_(threadIdx.x % 2 * 8),
          scale_turn_(scale_turn(threadIdx.x % 4 * 2)) {
        // Kept in registers; without the asm the compiler makes them again for each record.
        asm volatile("" : "+r"(own_), "+r"(scale_pair_), "+r"(scale_turn_));
    }

    // --- weights and their scales ---

    __device__ __forceinline__ void decode(const uint32_t (&w)[kWords], int s, uint32_t (&a)[16]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                decode_unit<T, Table>(w + (s / 2 * 2 + half) * K, s % 2 * 2 + i, own_, a + 8 * i + half);
        }
    }

    // The scales of subtile s in the even bytes of a word, and of all four.
    static __device__ __forceinline__ uint32_t load_scale(uint32_t scales, int s) {
        return load_record_32(scales + own_scales()) >> (8 * (s / 2));
    }
    static __device__ __forceinline__ void load_scales(uint32_t scales, uint32_t (&word)[kSubtiles]) {
        word[0] = word[1] = load_record_32(scales + own_scales());
        word[2] = word[3] = word[0] >> 8;
    }

    template <typename Element>
    static __device__ __forceinline__ void scale_weights(uint32_t scale, uint32_t (&a)[16]) {
        const uint32_t scales = placed_pair<Element>(scale, false);
#pragma unroll
        for (int r = 0; r < 16; ++r)
            a[r] = Pair<Element>::multiply(a[r], r % 2 ? high_twice(scales) : low_twice(scales));
    }

    // The scales of blocks 2t and 2t + 1, for kernels that scale sums.
    __device__ __forceinline__ void scales_of_subtile(uint32_t scales, int, RowScales& even, RowScales& odd) const {
        if constexpr (kScaleLanes == 4) {
            even = odd = scales_in(load_record_32(scales), scale_turn_);
        } else {
            uint32_t first, second;
            load_record_64(scales + scale_pair_, first, second);
            even = scales_in(first, scale_turn_), odd = scales_in(second, scale_turn_);
        }
    }
    __device__ __forceinline__ RowScales scales_of_block(uint32_t scales, int block) const {
        return scales_in(load_record_32(scales + block % 4 / kScaleLanes * 4), scale_turn(block));
    }

  private:
    // How far a word of scales is turned right so that the byte of row g of a block is placed; of row g + 8, 16
    // further.
    static __device__ __forceinline__ uint32_t scale_turn(int block) {
        return 8 * (block / 4) + 32 - PlacedScale<float>::kShift;
    }
    static __device__ __forceinline__ RowScales scales_in(uint32_t word, uint32_t turn) {
        constexpr uint32_t kMask = 0xFFu << PlacedScale<float>::kShift;
        return {scale_of_placed(turn_right(word, turn) & kMask), scale_of_placed(turn_right(word, turn + 16) & kMask)};
    }
    static __device__ __forceinline__ uint32_t own_scales() { return threadIdx.x % 4 / kScaleLanes * 4; }

    uint32_t own_;         // own_trellis_copy
    uint32_t scale_pair_;  // bytes from the scales of a row to those of blocks 2t and 2t + 1
    uint32_t scale_turn_;  // of those
};

// The codec: which decoder each kernel uses.
template <int K, int ScaleBlocks>
struct TrellisTiles {
    static constexpr Codec kCodec = Codec::trellis;
    static constexpr int kBits = K;
    static constexpr int kScaleBlocks = ScaleBlocks;
    static constexpr bool kWholeBlocks = true;
    template <typename T, int M>
    using Few = TrellisDecoder<T, TrellisFew<K, ScaleBlocks, M>>;
    template <typename T, int M>
    using FewSmaller = TrellisDecoder<T, TrellisFewSmaller<K, ScaleBlocks, M>>;
    template <typename T>
    using Many = TrellisDecoder<T, TrellisMany<K, ScaleBlocks>>;
    template <typename T, int M>
    using Sm90 = TrellisDecoder<T, TrellisMany<K, ScaleBlocks>>;
    using Rows = TrellisRows<K, ScaleBlocks>;
};

}  // namespace kbitq::tiled
