// One CTA a record, staged in shared memory; a thread owns one block of one row. Done once a weight: simple, not fast.
#include "cuda/launch.cuh"
#include "format/tile_order.h"
#include "ops/codec/repack.h"

namespace kbitq {
namespace {

constexpr int kThreads = kTileRows * kTileBlocks;

__global__ __launch_bounds__(kThreads) void repack_kernel(const RepackArgs args) {
    __shared__ uint32_t record[tile_words(kTileMaxBits)];
    const int words = tile_words(args.k);
    const int64_t nblk = blocks_per_row(args.cols), chunks = tile_chunks(args.cols);
    uint32_t* const global = args.tiles + static_cast<int64_t>(blockIdx.x) * words;
    for (int i = threadIdx.x; i < words; i += kThreads) record[i] = args.inverse ? global[i] : 0u;
    __syncthreads();
    const int row = threadIdx.x / kTileBlocks, block = threadIdx.x % kTileBlocks;
    const int64_t r = blockIdx.x / chunks * kTileRows + row, b = blockIdx.x % chunks * kTileBlocks + block;
    uint8_t* const scale = reinterpret_cast<uint8_t*>(record) + tile_scale_byte(args.k, row, block);
    if (r < args.rows && b < nblk) {
        int32_t* const planes = args.packed + (r * nblk + b) * args.k;
        for (int bit = 0; bit < args.k; ++bit) {
            uint32_t plane = args.inverse ? 0u : static_cast<uint32_t>(planes[bit]);
            for (int i = 0; i < kBlock; ++i) {
                const TileBit at = tile_bit(args.k, row, block * kBlock + i, bit);
                if (args.inverse) {
                    plane |= ((record[at.word] >> at.shift) & 1u) << i;
                } else if ((plane >> i) & 1u) {
                    atomicOr(&record[at.word], 1u << at.shift);
                }
            }
            if (args.inverse) planes[bit] = static_cast<int32_t>(plane);
        }
        if (args.inverse) {
            args.absmax[r * nblk + b] = *scale;
        } else {
            *scale = args.absmax[r * nblk + b];  // a byte of a word that no index shares
        }
    }
    if (args.inverse) return;
    __syncthreads();
    for (int i = threadIdx.x; i < words; i += kThreads) global[i] = record[i];
}

// The matmul kernels may read tiles before the kernel ahead of them has ended (ops/matmul.h): this is the one ahead.
__global__ void settle_kernel() {}

}  // namespace

void repack_cuda(const RepackArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    const auto on = static_cast<cudaStream_t>(stream);
    const int64_t records = row_tiles(args.rows) * tile_chunks(args.cols);
    if (records == 0) return;
    repack_kernel<<<static_cast<unsigned>(records), kThreads, 0, on>>>(args);
    settle_kernel<<<1, 1, 0, on>>>();
    check_cuda(cudaGetLastError(), "repack", matrix_shape(args.rows, args.cols));
}

}  // namespace kbitq
