// Tiles to a matrix, for the library's matmul. A warp takes a record: a lane has 8 neighbours of rows g and g + 8 in
// each block, so it makes 16 bytes of output at a time.
#include "cuda/launch.cuh"
#include "ops/linear/tiled.h"
#include "ops/linear/tiled_dispatch.cuh"

namespace kbitq {
namespace tiled {
namespace {

constexpr int kWarps = 8;

// Codec: its Floats (codecs/planes_floats.cuh) decode.
template <typename T, class Codec>
__global__ __launch_bounds__(kWarps * 32) void decode_kernel(const TiledDecodeArgs args, int64_t records, bool vector) {
    using Values = typename Codec::Floats;
    constexpr bool kWholeBlocks = Codec::kWholeBlocks;
    __shared__ __align__(4096) float table[Values::kTableFloats];
    Values::fill_table(table, args.packed.codebook);
    __syncthreads();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t chunks = tile_chunks(args.packed.cols);
    for (int64_t record = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; record < records;
         record += static_cast<int64_t>(gridDim.x) * kWarps) {
        Values values(table, args.packed.words + record * Values::kRecordWords);
#pragma unroll
        for (int s = 0; s < kSubtiles; ++s) {
            values.begin_subtile(s);
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int block = part / 2, half = part % 2;
                const int64_t row = record / chunks * kTileRows + g + 8 * half;
                const int64_t col = record % chunks * kTileCols + group_of_unit<kWholeBlocks>(2 * s + block, t) * 8;
                float v[8];
                values.decode(block, half, v);
                if (row < args.packed.rows)
                    store_eight_in_row(static_cast<T*>(args.out) + row * args.packed.cols + col, v,
                                       args.packed.cols - col, vector);
            }
        }
    }
}

}  // namespace
}  // namespace tiled

void tiled_decode_cuda(const TiledDecodeArgs& args, int device, void* stream) {
    using namespace tiled;
    const int64_t rows = args.packed.rows, cols = args.packed.cols, records = row_tiles(rows) * tile_chunks(cols);
    if (records == 0) return;
    const DeviceGuard guard(device);
    const unsigned grid = grid_for(divide_up(records, kWarps), device, 8);
    const bool vector = cols % 8 == 0 && all_aligned16({args.out});
    const auto on = static_cast<cudaStream_t>(stream);
    with_codecs("decode", args.packed, [&](auto codecs) {
        codecs.find(args.packed, [&](auto codec) {
            with_dtype(args.dtype, [&](auto element) {
                const auto kernel = decode_kernel<typename decltype(element)::Type, decltype(codec)>;
                kernel<<<grid, kWarps * 32, 0, on>>>(args, records, vector);
            });
        });
    });
    check_cuda(cudaGetLastError(), "decode", matrix_shape(rows, cols));
}

}  // namespace kbitq
