// Planes in tile order (codecs/planes_tiles.h) to exact values, codebook[index] * scale in float32: the values of
// dequantize. Levels come from a table in shared memory in which every lane has its own bank.
#pragma once

#include "codecs/planes_table.cuh"
#include "format/scale_e4m4.h"

namespace kbitq::tiled {

template <int K>
class PlanesFloats {
    static constexpr int kEntryBit = 7;                 // an entry is 32 lanes x 4 bytes
    static constexpr int kGathered = K == 3 || K == 5;  // pairs whose bits lie in several words become a word of theirs

  public:
    static constexpr int kTableFloats = 32 << K;
    static constexpr int kRecordWords = tile_words(K);

    // Every thread of the CTA takes part; the caller puts a barrier after it.
    static __device__ __forceinline__ void fill_table(float* table, const float* codebook) {
        for (int i = threadIdx.x; i < kTableFloats; i += blockDim.x) table[i] = codebook[i / 32];
    }

    // A lane's part of a record in global memory.
    __device__ __forceinline__ PlanesFloats(const float* table, const uint32_t* record)
        : table_(reinterpret_cast<const char*>(table)) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < K; ++j)
            *reinterpret_cast<uint4*>(words_ + 4 * j) = reinterpret_cast<const uint4*>(record)[j * 32 + lane];
        const uint4 scales = reinterpret_cast<const uint4*>(record + tile_index_words(K))[lane / 4];
        scales_[0] = scales.x, scales_[1] = scales.y, scales_[2] = scales.z, scales_[3] = scales.w;
    }

    // Makes subtile s the one that `decode` takes values of.
    __device__ __forceinline__ void begin_subtile(int s) {
#pragma unroll
        for (int i = 0; i < K; ++i) w_[i] = words_[s * K + i];
        if constexpr (K == 3) w_[3] = last_pairs(w_);
        if constexpr (K == 5) {
            w_[5] = 0;
#pragma unroll
            for (int i = 0; i < 5; ++i) w_[5] |= (w_[i] >> 5 & 3u) << (2 * i + kEntryBit);
        }
        scale_ = scales_[s];
    }

    // The lane's eight neighbours in block 0 or 1 of the subtile, of row g (half 0) or g + 8 (half 1).
    __device__ __forceinline__ void decode(int block, int half, float (&v)[8]) const {
        const float scale = decode_e4m4(scale_ >> (16 * half + 8 * block) & 0xFFu);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int pair = block * 8 + e / 4 * 4 + half + 2 * (e % 4 / 2);
            v[e] = *reinterpret_cast<const float*>(table_ + entry(pair, e % 2)) * scale;
        }
    }

  private:
    // Where in the table the level of weight `odd` of a pair lies for this lane, in bytes.
    __device__ __forceinline__ uint32_t entry(int pair, int odd) const {
        const int word = K == 2 ? pair / 8 : K == 5 ? pair / 3 : pair / 4;
        const int shift = K == 2   ? 8 * (pair % 8 / 2) + 4 * odd + 2 * (pair % 2)
                          : K == 5 ? pair == 15 ? kEntryBit + 5 * odd : (7 + 10 * (pair % 3) + 5 * odd) % 32
                                   : 8 * (pair % 4) + 4 * odd;
        const uint32_t turned = __funnelshift_r(w_[word], w_[word], (shift - kEntryBit + 32) % 32);
        return (turned & (((1u << K) - 1) << kEntryBit)) | threadIdx.x % 32 * 4;
    }

    const char* table_;
    uint32_t words_[4 * K], scales_[kSubtiles];
    uint32_t w_[K + kGathered], scale_;  // of the subtile
};

}  // namespace kbitq::tiled
