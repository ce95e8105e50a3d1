// Tiles to a matrix, for the library's matmul. A warp takes a record. Where a lane has 8 neighbours of every block it
// stores them from where it is; where it has whole blocks, those go through shared memory, so that the warp stores
// whole rows of the record.
#include "codecs/level_table.cuh"
#include "cuda/launch.cuh"
#include "ops/linear/tiled.h"
#include "ops/linear/tiled_dispatch.cuh"

namespace kbitq {
namespace tiled {
namespace {

constexpr int kWarps = 8;

// For codecs whose lanes have parts of blocks; their Floats (codecs/planes_floats.cuh) decode.
template <typename T, class Codec>
__global__ __launch_bounds__(kWarps * 32) void decode_kernel(const TiledDecodeArgs args, int64_t records, bool vector) {
    using Values = typename Codec::Floats;
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
                const int64_t col = record % chunks * kTileCols + group_of_unit<false>(2 * s + block, t) * 8;
                float v[8];
                values.decode(block, half, v);
                if (row < args.packed.rows)
                    store_eight_in_row(static_cast<T*>(args.out) + row * args.packed.cols + col, v,
                                       args.packed.cols - col, vector);
            }
        }
    }
}

// For codecs whose lanes have whole blocks; their Rows (codecs/trellis_records.cuh) put a record in the order of rows.
template <typename T, class Codec>
__global__ __launch_bounds__(kWarps * 32) void decode_rows_kernel(const TiledDecodeArgs args, int64_t records,
                                                                  bool vector) {
    using Rows = typename Codec::Rows;
    using InRows = typename Rows::InRows;
    using Levels = LevelTable<InRows::kIndexBits>;
    static_assert(kWarps * 32 == kLevelTableThreads);
    __shared__ float shared_levels[Levels::kInLanes ? 1 : 1 << InRows::kIndexBits];
    __shared__ typename Rows::Shared shared[kWarps];
    const Levels levels(args.packed.codebook, shared_levels);
    auto& own = shared[threadIdx.x / 32];
    const int block = threadIdx.x % 32 / 4;
    const int64_t chunks = tile_chunks(args.packed.cols), step = static_cast<int64_t>(gridDim.x) * kWarps;
    int64_t record = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    Rows rows;
    if (record < records) rows.load(args.packed.words, record);
    for (; record < records; record += step) {
        rows.spread(own);
        __syncwarp();
        if (record + step < records) rows.load(args.packed.words, record + step);  // while this one is decoded
        const int64_t first = record / chunks * kTileRows;
        const int64_t col = record % chunks * kTileCols + block * kBlock + threadIdx.x % 4 * 8;
#pragma unroll 4
        for (int row = 0; row < kTileRows; ++row) {
            uint32_t w[InRows::kWords];
            float v[8];
            read_words<InRows::kWords>(w, Rows::words(own, row, block));
            decode_eight<InRows>(v, w, levels, own.scales[row][block]);
            if (first + row < args.packed.rows)
                store_eight_in_row(static_cast<T*>(args.out) + (first + row) * args.packed.cols + col, v,
                                   args.packed.cols - col, vector);
        }
        __syncwarp();
    }
}

template <typename T, class Codec>
constexpr auto decode_kernel_of() {
    if constexpr (Codec::kWholeBlocks) {
        return decode_rows_kernel<T, Codec>;
    } else {
        return decode_kernel<T, Codec>;
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
                const auto kernel = decode_kernel_of<typename decltype(element)::Type, decltype(codec)>();
                kernel<<<grid, kWarps * 32, 0, on>>>(args, records, vector);
            });
        });
    });
    check_cuda(cudaGetLastError(), "decode", matrix_shape(rows, cols));
}

}  // namespace kbitq
