// A record of tiles (format/tile_order.h) on its way through a matmul kernel: from global to shared memory, to
// registers, times its scales.
#pragma once

#include "codecs/planes_tiles.cuh"

namespace kbitq::matmul {

// The words of a lane in a record; `own` is the shared address of its first.
template <int K>
__device__ __forceinline__ void load_words(uint32_t own, uint32_t (&w)[4 * K]) {
#pragma unroll
    for (int j = 0; j < K; ++j) {
        const uint4 v = load_record_128(own + j * 512);
        w[4 * j] = v.x, w[4 * j + 1] = v.y, w[4 * j + 2] = v.z, w[4 * j + 3] = v.w;
    }
}

// From the address of a lane's first word in a record to that of the scales of its rows: four words, one a subtile.
template <int K>
__device__ __forceinline__ int scales_from_own() {
    const int lane = threadIdx.x % 32;
    return Record<K>::kScaleOffset + lane / 4 * 16 - lane * 16;
}

// A decoded subtile times its scales.
template <typename T>
__device__ __forceinline__ void scale_subtile(uint32_t word, uint32_t (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t scales = scale_pair<T>(word, i);
#pragma unroll
        for (int r = 0; r < 8; ++r)
            a[8 * i + r] = Pair<T>::multiply(a[8 * i + r], r % 2 ? high_twice(scales) : low_twice(scales));
    }
}

// Copies one record, 16 bytes a lane at a time; `from` and `to` are this lane's.
template <int K>
__device__ __forceinline__ void copy_record(uint32_t to, const uint8_t* from) {
#pragma unroll
    for (int j = 0; j < K; ++j) copy_async_16(to + j * 512, from + j * 512);
    if (threadIdx.x % 32 < kTileScaleWords / 4) {
        copy_async_16(to + Record<K>::kScaleOffset, from + Record<K>::kScaleOffset);
    }
}

}  // namespace kbitq::matmul
