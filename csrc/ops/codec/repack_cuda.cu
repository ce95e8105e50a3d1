// One CTA a record, staged in shared memory; a thread owns one block of one row. Done once a weight: simple, not fast.
#include "codecs/tile_records.h"
#include "cuda/launch.cuh"
#include "ops/codec/repack.h"

namespace kbitq {
namespace {

constexpr int kThreads = kTileRows * kTileBlocks;

__global__ __launch_bounds__(kThreads) void repack_kernel(const RepackArgs args) {
    __shared__ uint32_t record[tile_words(kTileMaxBits)];
    const PackedOutput& packed = args.packed;
    const int words = record_words(packed.codec, packed.k, packed.scale_blocks);
    const int64_t nblk = blocks_per_row(packed.cols), chunks = tile_chunks(packed.cols);
    uint32_t* const global = args.tiles + static_cast<int64_t>(blockIdx.x) * words;
    for (int i = threadIdx.x; i < words; i += kThreads) record[i] = args.inverse ? global[i] : 0u;
    __syncthreads();
    const int row = threadIdx.x / kTileBlocks, block = threadIdx.x % kTileBlocks;
    const int64_t r = blockIdx.x / chunks * kTileRows + row, b = blockIdx.x % chunks * kTileBlocks + block;
    if (r < packed.rows && b < nblk) {
        uint8_t* const scale = reinterpret_cast<uint8_t*>(record) +
                               record_scale_byte(packed.codec, packed.k, packed.scale_blocks, row, block);
        uint8_t* const absmax =
            packed.scales + r * scales_per_row(packed.cols, packed.scale_blocks) + b / packed.scale_blocks;
        uint32_t* const planes = packed.words + (r * nblk + b) * packed.k;
        if (args.inverse) {
            take_block(packed.codec, packed.k, record, row, block, planes);
        } else {
            put_block(packed.codec, packed.k, planes, record, row, block,
                      [](uint32_t& word, uint32_t bits) { atomicOr(&word, bits); });
        }
        if (b % packed.scale_blocks == 0) {  // a byte of a word that no index shares
            if (args.inverse) {
                *absmax = *scale;
            } else {
                *scale = *absmax;
            }
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
