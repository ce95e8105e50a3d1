// One CTA a record, staged in shared memory; a thread owns one block of one row. Done once a weight: simple, not fast.
#include "codecs/planes_tiles.h"
#include "cuda/launch.cuh"
#include "ops/codec/repack.h"

namespace kbitq {
namespace {

constexpr int kThreads = kTileRows * kTileBlocks;

__global__ __launch_bounds__(kThreads) void repack_kernel(const RepackArgs args) {
    __shared__ uint32_t record[tile_words(kTileMaxBits)];
    const int words = tile_words(args.packed.k);
    const int64_t nblk = blocks_per_row(args.packed.cols), chunks = tile_chunks(args.packed.cols);
    uint32_t* const global = args.tiles + static_cast<int64_t>(blockIdx.x) * words;
    for (int i = threadIdx.x; i < words; i += kThreads) record[i] = args.inverse ? global[i] : 0u;
    __syncthreads();
    const int row = threadIdx.x / kTileBlocks, block = threadIdx.x % kTileBlocks;
    const int64_t r = blockIdx.x / chunks * kTileRows + row, b = blockIdx.x % chunks * kTileBlocks + block;
    uint8_t* const scale = reinterpret_cast<uint8_t*>(record) + tile_scale_byte(args.packed.k, row, block);
    if (r < args.packed.rows && b < nblk) {
        uint32_t* const planes = args.packed.words + (r * nblk + b) * args.packed.k;
        for (int bit = 0; bit < args.packed.k; ++bit) {
            uint32_t plane = args.inverse ? 0u : planes[bit];
            for (int i = 0; i < kBlock; ++i) {
                const TileBit at = tile_bit(args.packed.k, row, block * kBlock + i, bit);
                if (args.inverse) {
                    plane |= ((record[at.word] >> at.shift) & 1u) << i;
                } else if ((plane >> i) & 1u) {
                    atomicOr(&record[at.word], 1u << at.shift);
                }
            }
            if (args.inverse) planes[bit] = plane;
        }
        if (args.inverse) {
            args.packed.scales[r * nblk + b] = *scale;
        } else {
            *scale = args.packed.scales[r * nblk + b];  // a byte of a word that no index shares
        }
    }
    if (args.inverse) return;
    __syncthreads();
    for (int i = threadIdx.x; i < words; i += kThreads) global[i] = record[i];
}

// The tiled kernels may read tiles before the kernel ahead of them has ended (ops/linear/tiled.h): this is the one
// ahead.
__global__ void settle_kernel() {}

}  // namespace

void repack_cuda(const RepackArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    const auto on = static_cast<cudaStream_t>(stream);
    const int64_t records = row_tiles(args.packed.rows) * tile_chunks(args.packed.cols);
    if (records == 0) return;
    repack_kernel<<<static_cast<unsigned>(records), kThreads, 0, on>>>(args);
    settle_kernel<<<1, 1, 0, on>>>();
    check_cuda(cudaGetLastError(), "repack", matrix_shape(args.packed.rows, args.packed.cols));
}

}  // namespace kbitq
