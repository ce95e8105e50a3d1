// From the words of a block to eight neighbours of it, for kernels that write whole rows: four lanes a block. The codec
// (codecs/planes.cuh, trellis.cuh) makes the indices.
#pragma once

#include <cstdint>

namespace kbitq {
namespace {

constexpr int kLevelTableThreads = 256;  // of a CTA that has a LevelTable

// The levels as lookup(index) sees them. Bits above those of the index are ignored: where a shuffle looks up, because
// the levels repeat over the lanes. Every lane of the warp must take part.
template <int Bits>
class LevelTable {
  public:
    static constexpr bool kInLanes = Bits <= 5;

    __device__ __forceinline__ LevelTable(const float* codebook, float* shared) : shared_(shared) {
        if constexpr (kInLanes) {
            mine_ = codebook[threadIdx.x & ((1 << Bits) - 1)];
        } else {
            for (int i = threadIdx.x; i < (1 << Bits); i += kLevelTableThreads) shared[i] = codebook[i];
            __syncthreads();
        }
    }

    __device__ __forceinline__ float lookup(uint32_t index) const {
        if constexpr (kInLanes) return __shfl_sync(~0u, mine_, index);
        return shared_[index & ((1 << Bits) - 1)];
    }

  private:
    const float* shared_;
    float mine_ = 0.0f;
};

// The words of a block, from shared memory, where they lie aligned to their number.
template <int K>
__device__ __forceinline__ void read_words(uint32_t (&w)[K], const uint32_t* p) {
    if constexpr (K % 4 == 0) {
#pragma unroll
        for (int j = 0; j < K; j += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(p + j);
            w[j] = four.x, w[j + 1] = four.y, w[j + 2] = four.z, w[j + 3] = four.w;
        }
    } else if constexpr (K % 2 == 0) {
#pragma unroll
        for (int j = 0; j < K; j += 2) {
            const uint2 two = *reinterpret_cast<const uint2*>(p + j);
            w[j] = two.x, w[j + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int j = 0; j < K; ++j) w[j] = p[j];
    }
}

// Eight values of a block from its words.
template <class Codec>
__device__ __forceinline__ void decode_eight(float (&v)[8], const uint32_t (&w)[Codec::kWords],
                                             const LevelTable<Codec::kIndexBits>& levels, float scale) {
    const typename Codec::Indices index = Codec::indices(w, threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = levels.lookup(index.at(i)) * scale;
}

}  // namespace
}  // namespace kbitq
