// The launchers of tiled_many.cuh: how the work is cut, and the table of instances.
#include "ops/linear/tiled.h"

#include <algorithm>

#include "ops/linear/tiled_dispatch.cuh"
#include "ops/linear/tiled_launch.cuh"
#include "ops/linear/tiled_many.cuh"

namespace kbitq {
namespace matmul {
namespace {

struct GemmPlan {
    int warps = 0, splits = 0, blocks_per_group = 0;
};

// Rounds of chunks that the busiest multiprocessor goes through, times the row tiles of a CTA: least for the best cut.
GemmPlan plan_gemm(int tiles_per_group, int warp_tiles, int max_warps, int chunks, int groups, int multiprocessors,
                   int max_splits) {
    constexpr int kSplitCost = 12, kLeastBusyTiles = 14;
    GemmPlan best;
    int64_t least = INT64_MAX;
    const int most = std::min(max_warps, (tiles_per_group + warp_tiles - 1) / warp_tiles);
    for (int warps = most; warps >= std::min(max_warps / 2, most); --warps) {
        const int blocks_per_group = (tiles_per_group + warps * warp_tiles - 1) / (warps * warp_tiles);
        for (int splits = 1; splits <= std::min(max_splits, chunks); ++splits) {
            const int64_t blocks = static_cast<int64_t>(blocks_per_group) * groups;
            if (splits > 1 && (blocks * splits > multiprocessors || blocks * warps > kMatmulCounters)) break;
            const int64_t waves = (blocks * splits + multiprocessors - 1) / multiprocessors;
            const int64_t cost =
                waves * ((chunks + splits - 1) / splits) * std::max(warps * warp_tiles, kLeastBusyTiles) +
                (splits > 1 ? kSplitCost + 4 * splits : 0);
            if (cost < least) {
                least = cost;
                best = {warps, splits, blocks_per_group};
            }
        }
    }
    return best;
}

template <typename T, int K, int NT>
void launch_gemm(const TileMatmulArgs& args, const ExpertArgs& experts, int device, cudaStream_t stream) {
    const DeviceFacts& facts = device_facts(device);
    const int64_t rows = args.weight.rows / args.weight.groups;
    const int tiles_per_group = static_cast<int>(row_tiles(rows)),
              chunks = static_cast<int>(tile_chunks(args.weight.cols));
    const int max_splits = experts.offsets ? 1 : chunks;  // partial sums have room for one slice of x
    using Layout = GemmLayout<K, NT>;
    const GemmPlan plan = plan_gemm(tiles_per_group, Layout::kTiles, Layout::kMaxWarps, chunks,
                                    static_cast<int>(args.weight.groups), facts.multiprocessors, max_splits);
    GemmParams p = gemm_params(args, plan.blocks_per_group, plan.splits);
    p.x = args.x;
    p.vector_x = rows_in_vectors(args);
    p.offsets = experts.offsets;
    p.rows = args.weight.rows / experts.experts;
    p.groups_per_expert = static_cast<int>(args.weight.groups / experts.experts);
    const dim3 grid(static_cast<unsigned>(args.weight.groups) * plan.blocks_per_group * plan.splits);
    static Raised raised;
    launch<GemmParams>("gemm", gemm_kernel<T, K, NT>, raised, p, grid, plan.warps * 32, Layout::bytes(plan.warps),
                       device, stream);
}

template <typename T, int K>
void launch_gemm_k(const TileMatmulArgs& args, const ExpertArgs& experts, int64_t m, int device, cudaStream_t stream) {
    if (m <= 8) return launch_gemm<T, K, 1>(args, experts, device, stream);
    if (m <= 16) return launch_gemm<T, K, 2>(args, experts, device, stream);
    if (m <= 32) return launch_gemm<T, K, 4>(args, experts, device, stream);
    return launch_gemm<T, K, kGemmSlice / 8>(args, experts, device, stream);
}

// m: the rows of x that are expected to use one weight.
void launch_any(const TileMatmulArgs& args, const ExpertArgs& experts, int64_t m, int device, void* stream) {
    const DeviceGuard guard(device);
    with_instance("gemm", args, [&](auto type, auto bits) {
        launch_gemm_k<typename decltype(type)::Type, bits>(args, experts, m, device, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace
}  // namespace matmul

int64_t matmul_workspace_bytes(int device) {
    return multiprocessors(device) * kWorkspaceSums * static_cast<int64_t>(sizeof(float));
}

void matmul_cuda(const TileMatmulArgs& args, int device, void* stream) {
    const int64_t most = args.staging ? kWideSlice : kGemmSlice;
    for (int64_t m0 = 0; m0 < args.m; m0 += most) {
        TileMatmulArgs slice = args;
        slice.m = std::min(most, args.m - m0);
        slice.x = static_cast<const uint16_t*>(args.x) + m0 * args.weight.cols;
        slice.y = static_cast<uint16_t*>(args.y) + m0 * args.weight.rows;
        if (slice.m <= kGemvMaxBatch) {
            gemv_cuda(slice, device, stream);
        } else if (args.staging && wide_staging_bytes(slice.m, args.weight.rows, args.weight.cols, device) > 0) {
            wide_cuda(slice, device, stream);
        } else {
            gemm_cuda(slice, device, stream);
        }
    }
}

void gemm_cuda(const TileMatmulArgs& args, int device, void* stream) {
    matmul::launch_any(args, {nullptr, 1}, args.m, device, stream);
}

void grouped_gemm_cuda(const TileMatmulArgs& args, const ExpertArgs& experts, int device, void* stream) {
    matmul::launch_any(args, experts, (args.m + experts.experts - 1) / experts.experts, device, stream);
}

}  // namespace kbitq
