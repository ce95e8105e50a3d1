// matmul: y = x W^T (+ bias) on the GPU, from tiles (format/tile_order.h). Five ways, by the number of rows of x:
// gemv (tiled_few.cuh, 1..16), gemm (tiled_many.cuh, tens), wide (tiled_sm90.cuh, to hundreds, on sm_90a), gemm for
// the experts of a layer in one launch, and for more, the weights decoded to a matrix for the library's matmul
// (tiled_decode_cuda.cu). matmul_cuda takes the quickest of the first three; when to decode: kbitq/ops/tiled_linear.py.
#pragma once

#include <cstdint>

#include "codecs/packed_matrix.h"
#include "format/block.h"
#include "format/tile_order.h"

namespace kbitq {

// The kernels read tiles and codebook while the kernel ahead of them in the stream may still run. Whoever writes those
// puts an ordinary kernel between: repack_cuda does (ops/repack.h).
struct TileMatmulArgs {
    const void* x;  // [m, weight.cols]
    DType dtype;    // bf16 or f16: of x, bias and y
    int64_t m;
    PackedMatrix
        weight;          // in the order of tiles; k: 2..kTileMaxBits; several groups: each a multiple of kTileRows rows
    const void* bias;    // [weight.rows] or null
    void* y;             // [m, weight.rows]
    float* workspace;    // matmul_workspace_bytes() of it: partial sums
    uint32_t* counters;  // kMatmulCounters, zero before the first call; every call leaves them zero
    void* staging;       // wide_staging_bytes() of it: x in the order that wide wants; null: without wide
};

// The rows of x that belong to each expert: expert e's are offsets[e] .. offsets[e + 1]. y is [m, rows / experts].
struct ExpertArgs {
    const int32_t* offsets;  // [experts + 1] on the device, ascending from 0 to m
    int64_t experts;         // groups is a multiple of it, and rows of W too
};

constexpr int kGemvMaxBatch = 16;
constexpr int kGemmSlice = 64;   // so many rows of x decode the weights once
constexpr int kWideSlice = 256;  // the same for wide
// One slice of sums for each warp of a grid that fills the device once: of wide with 256 rows of x, two warpgroups.
// Those of gemm and of gemv are less.
constexpr int64_t kWorkspaceSums = 8 * kTileRows * kWideSlice;
constexpr int kBlockShared =
    227 * 1024;  // bytes of a block's shared memory that gemm and wide are laid out for (sm_90)
constexpr int kMatmulCounters = 4096;
constexpr int kMatmulCapability = 80;  // sm_80: bfloat16 mma, cp.async. Below it: decode and multiply

// Rows of x up to which matmul_cuda takes a product on this device. 0 where it is too old, or the code that this build
// has for it (from PTX of an older architecture the driver would make kernels without their instructions);
// kGemvMaxBatch where a block has less shared memory than gemm takes; INT64_MAX where everything runs.
int64_t matmul_rows(int device);

// Bytes of partial sums that any of them needs at most, for any shape, on this device: kWorkspaceSums floats for each
// multiprocessor.
int64_t matmul_workspace_bytes(int device);

// Bytes of staging for a product with so many rows of x; 0 where wide would not be used.
int64_t wide_staging_bytes(int64_t m, int64_t rows, int64_t cols, int device);

void matmul_cuda(const TileMatmulArgs& args, int device, void* stream);  // any m, in slices, each the quickest way
void gemv_cuda(const TileMatmulArgs& args, int device, void* stream);    // m <= kGemvMaxBatch
void gemm_cuda(const TileMatmulArgs& args, int device, void* stream);    // m <= kGemmSlice
void wide_cuda(const TileMatmulArgs& args, int device, void* stream);    // m <= kWideSlice
// One launch for all experts, any number of rows for each; an expert without rows costs nothing.
void grouped_gemm_cuda(const TileMatmulArgs& args, const ExpertArgs& experts, int device, void* stream);

struct DecodeTilesArgs {
    PackedMatrix packed;  // in the order of tiles, one codebook
    void* out;            // [rows, cols]
    DType dtype;
};

// codebook[index] * scale in float32, rounded once: the bytes of ops/dequantize.h.
void decode_tiles_cuda(const DecodeTilesArgs& args, int device, void* stream);

}  // namespace kbitq
