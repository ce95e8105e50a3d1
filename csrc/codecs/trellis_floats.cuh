// The codec `trellis` in tile order (codecs/trellis_tiles.h) to exact values, codebook[index] * scale in float32: the
// values of dequantize. Levels come from a table in shared memory in which every lane has its own bank.
#pragma once

#include "codecs/trellis_tiles.h"
#include "format/scale_e4m4.h"

namespace kbitq::tiled {

template <int K, int ScaleBlocks>
class TrellisFloats {
    static constexpr int kPlanes = K + kTrellisExtraBits;

  public:
    static constexpr int kTableFloats = 32 * trellis_levels(K);
    static constexpr int kRecordWords = trellis_tile_words(K, ScaleBlocks);

    // Every thread of the CTA takes part; the caller puts a barrier after it.
    static __device__ __forceinline__ void fill_table(float* table, const float* codebook) {
        for (int i = threadIdx.x; i < kTableFloats; i += blockDim.x) table[i] = codebook[i / 32];
    }

    // A lane's part of a record in global memory.
    __device__ __forceinline__ TrellisFloats(const float* table, const uint32_t* record)
        : table_(reinterpret_cast<const char*>(table)) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < K; ++j)
            *reinterpret_cast<uint4*>(words_ + 4 * j) = reinterpret_cast<const uint4*>(record)[j * 32 + lane];
        scales_ = record[trellis_tile_index_words(K) + (ScaleBlocks == 1 ? lane : lane / 4)];
    }

    // Makes subtile s the one that `decode` takes values of.
    __device__ __forceinline__ void begin_subtile(int s) {
        subtile_ = s;
        if (s % 2) return;  // of the same two blocks
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t file[K];
            from_tile_block(K, words_ + (s + half) * K, file);
            expand_path<K>(planes_[half], file);
        }
    }

    // Eight neighbours of the lane's block, the first or the second of the subtile, of row g (half 0) or g + 8 (half
    // 1).
    __device__ __forceinline__ void decode(int part, int half, float (&v)[8]) const {
        const float scale = decode_e4m4(scales_ >> (16 * half + 8 * (subtile_ / 2)) & 0xFFu);
#pragma unroll
        for (int four = 0; four < 2; ++four) {
            const int first = 8 * (subtile_ % 2 * 2 + part) + 4 * four;
            uint32_t indices = 0;
#pragma unroll
            for (int bit = 0; bit < kPlanes; ++bit)  // a bit of four neighbours becomes that of four bytes
                indices |= ((planes_[half][bit] >> first & 0xFu) * 0x00204081u & 0x01010101u) << bit;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint32_t entry = (indices >> (8 * e) & 0xFFu) << 7 | threadIdx.x % 32 * 4;
                v[4 * four + e] = *reinterpret_cast<const float*>(table_ + entry) * scale;
            }
        }
    }

  private:
    const char* table_;
    uint32_t words_[4 * K], scales_;
    uint32_t planes_[2][kPlanes];  // of rows g and g + 8
    int subtile_;
};

}  // namespace kbitq::tiled
