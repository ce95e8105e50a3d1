// Records of the codec `trellis` (codecs/trellis_tiles.h) put back in the order of rows, for kernels that write whole
// rows: a lane has whole blocks in its registers, but neighbours of a row must be stored together.
#pragma once

#include "codecs/trellis.cuh"
#include "codecs/trellis_tiles.h"
#include "format/scale_e4m4.h"

namespace kbitq::tiled {

// A record in a warp's part of the shared memory: for each block the words that a file has, and its scale. A row of
// blocks takes kStride words, so that no two lanes that store at once meet in a bank.
template <int K, int ScaleBlocks>
class TrellisRows {
    static constexpr int kStride = K == 1 ? 12 : K == 2 ? 24 : K == 3 ? 28 : 48;

  public:
    using InRows = Trellis<K, ScaleBlocks>;

    struct Shared {
        __align__(16) uint32_t words[kTileRows * kStride];
        float scales[kTileRows][kTileBlocks];
    };

    // Takes a lane's part of a record from global memory.
    __device__ __forceinline__ void load(const uint32_t* words, int64_t record) {
        const uint32_t* const own = words + record * trellis_tile_words(K, ScaleBlocks);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < K; ++j)
            *reinterpret_cast<uint4*>(words_ + 4 * j) = reinterpret_cast<const uint4*>(own)[j * 32 + lane];
        scales_ = own[trellis_tile_index_words(K) + (ScaleBlocks == 1 ? lane : lane / 4)];
    }

    // Puts it where `words` and `scale` find it; the caller puts a barrier of the warp before and after.
    __device__ __forceinline__ void spread(Shared& shared) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // the lane's blocks: 4j + t of row g + 8 * half
            const int row = g + n % 2 * 8, block = n / 2 * 4 + t;
            uint32_t file[K];
            from_tile_block(K, words_ + n * K, file);
            uint32_t* const to = shared.words + row * kStride + block * K;
            if constexpr (K == 4) {
                *reinterpret_cast<uint4*>(to) = make_uint4(file[0], file[1], file[2], file[3]);
            } else if constexpr (K == 2) {
                *reinterpret_cast<uint2*>(to) = make_uint2(file[0], file[1]);
            } else {
#pragma unroll
                for (int i = 0; i < K; ++i) to[i] = file[i];
            }
            shared.scales[row][block] = decode_e4m4(scales_ >> (n % 2 * 16 + n / 2 * 8) & 0xFFu);
        }
    }

    static __device__ __forceinline__ const uint32_t* words(const Shared& shared, int row, int block) {
        return shared.words + row * kStride + block * K;
    }

  private:
    __align__(16) uint32_t words_[4 * K];
    uint32_t scales_;
};

}  // namespace kbitq::tiled
