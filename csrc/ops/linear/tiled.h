// The linear layer on the GPU, y = x W^T (+ bias), from tiles (format/tile_order.h). The way depends on the rows of x:
//
//     few       1 .. 16                          tiled_few.cuh
//     many      tens                             tiled_many.cuh
//     sm90      tens to hundreds, on sm_90a      tiled_sm90.cuh
//     experts   of all experts of a layer        tiled_many.cuh, in one launch
//     decode    more                             tiled_decode_cuda.cu makes a matrix for the library's matmul
//
// tiled_linear_cuda takes the quickest of the first three; when to decode: kbitq/ops/tiled_linear.py.
#pragma once

#include <cstdint>

#include "codecs/packed_matrix.h"
#include "format/dtype.h"
#include "format/tile_order.h"

namespace kbitq {

// The kernels read tiles and codebook while the kernel ahead of them in the stream may still run. Whoever writes tiles
// or a codebook puts an ordinary kernel between: repack_cuda does (ops/codec/repack.h).
struct TiledLinearArgs {
    const void* x;  // [m, weight.cols]
    DType dtype;    // bf16 or f16: of x, bias and y
    int64_t m;
    PackedMatrix weight;  // in the order of tiles; several groups: each a multiple of kTileRows rows
    const void* bias;     // [weight.rows] or null
    void* y;              // [m, weight.rows]
    float* workspace;     // tiled_workspace_bytes() of it: partial sums
    uint32_t* counters;   // kTiledCounters, zero before the first call; every call leaves them zero
    void* staging;        // tiled_staging_bytes() of it: x in the order that sm90 wants; null: without sm90
};

// The rows of x that belong to each expert: expert e's are offsets[e] .. offsets[e + 1]. y is [m, rows / experts].
struct ExpertArgs {
    const int32_t* offsets;  // [experts + 1] on the device, ascending from 0 to m
    int64_t experts;         // groups is a multiple of it, and rows of W too
};

// Rows of x that a kernel takes in one launch.
constexpr int kFewRows = 16;
constexpr int kManyRows = 64;
constexpr int kSm90Rows = 256;
// Floats of workspace for each multiprocessor: the sums of one launch of sm90, with 256 rows of x and two warpgroups,
// 16 rows of W for each warp. Those of many and of few are less.
constexpr int64_t kWorkspaceSums = 8 * kTileRows * kSm90Rows;
constexpr int kBlockShared = 227 * 1024;  // bytes of a block's shared memory that many and sm90 are laid out for
constexpr int kTiledCounters = 4096;
constexpr int kTiledCapability = 80;  // sm_80: bfloat16 mma, cp.async. Below it: decode and multiply

// Rows of x up to which tiled_linear_cuda takes a product on this device. 0 where the device is too old, or where this
// build has only PTX of an older architecture for it (the driver would make kernels of that which lack the
// instructions); kFewRows where a block has less shared memory than many takes; INT64_MAX where everything runs.
int64_t tiled_linear_rows(int device);

// Bytes of partial sums that any of them needs at most, for any shape, on this device.
int64_t tiled_workspace_bytes(int device);

// Bytes of staging for a product with so many rows of x; 0 where sm90 would not be used.
int64_t tiled_staging_bytes(int64_t m, int64_t rows, int64_t cols, int device);

void tiled_linear_cuda(const TiledLinearArgs& args, int device, void* stream);  // any m, in slices
void tiled_few_cuda(const TiledLinearArgs& args, int device, void* stream);     // m <= kFewRows
void tiled_many_cuda(const TiledLinearArgs& args, int device, void* stream);    // m <= kManyRows
void tiled_sm90_cuda(const TiledLinearArgs& args, int device, void* stream);    // m <= kSm90Rows
// One launch for all experts, any number of rows for each; an expert without rows costs nothing.
void tiled_experts_cuda(const TiledLinearArgs& args, const ExpertArgs& experts, int device, void* stream);

struct TiledDecodeArgs {
    PackedMatrix packed;  // in the order of tiles, one codebook
    void* out;            // [rows, cols]
    DType dtype;
};

// codebook[index] * scale in float32, rounded once: the bytes of ops/codec/dequantize.h.
void tiled_decode_cuda(const TiledDecodeArgs& args, int device, void* stream);

}  // namespace kbitq
