// The launcher of tiled_sm90.cuh: how the work is cut, and the table of instances.
#include "ops/linear/tiled.h"

#include <algorithm>

#include "ops/linear/tiled_dispatch.cuh"
#include "ops/linear/tiled_launch.cuh"
#include "ops/linear/tiled_sm90.cuh"

namespace kbitq {
namespace matmul {
namespace {

// Whether the compiler was asked for sm_90a (csrc/cmake/cuda.cmake): without it the kernels only trap.
#if defined(KBITQ_SM90A)
constexpr bool kBuilt = true;
#else
constexpr bool kBuilt = false;
#endif

constexpr int kLeastRows = 17;                // of x; below, gemm is as fast
constexpr int kSlowerForSmall = 32;           // to so many rows of x, gemm is as fast for a small weight
constexpr int64_t kSmall = int64_t{5} << 22;  // elements

// Rows of x of the smallest instance for m.
int instance_rows(int64_t m) { return m <= 32 ? 32 : m <= 64 ? 64 : m <= 128 ? 128 : 256; }

struct WidePlan {
    int groups = 0, splits = 0, blocks_per_group = 0;
};

// Hundredths of a microsecond that a chunk takes a CTA of so many warpgroups, on an H200.
int chunk_time(int n, int groups) {
    if (n <= 32) return groups == 2 ? 93 : 141;
    if (n <= 64) return groups == 2 ? 117 : 183;
    return n <= 128 ? 188 : 274;
}

// The cut with the least time of the busiest multiprocessor, and of adding up what several CTAs have.
WidePlan plan_wide(int tiles_per_group, int n, int chunks, int groups_of_rows, int multiprocessors) {
    constexpr int kSplitTime = 110, kMaxSplits = 8;  // for 64 rows of x
    WidePlan best;
    int64_t least = INT64_MAX;
    for (int groups = n <= 64 ? 4 : 2; groups >= 2; groups -= 2) {
        const int warps = groups * 4, blocks_per_group = (tiles_per_group + warps - 1) / warps;
        const int64_t blocks = static_cast<int64_t>(blocks_per_group) * groups_of_rows;
        for (int splits = 1; splits <= std::min(kMaxSplits, chunks); ++splits) {
            if (splits > 1 && (blocks * splits > multiprocessors || blocks * warps > kMatmulCounters)) break;
            const int64_t waves = (blocks * splits + multiprocessors - 1) / multiprocessors;
            const int64_t time = waves * ((chunks + splits - 1) / splits) * chunk_time(n, groups) +
                                 (splits > 1 ? kSplitTime * splits * std::max(n, 32) / 64 : 0);
            if (time < least) {
                least = time;
                best = {groups, splits, blocks_per_group};
            }
        }
    }
    return best;
}

template <typename T, int K, int N, int Groups>
void launch_wide(const TileMatmulArgs& args, const WidePlan& plan, int device, cudaStream_t stream) {
    using Layout = WideLayout<K, N, Groups>;
    ArrangeParams a{};
    a.x = args.x;
    a.out = static_cast<uint4*>(args.staging);
    a.cols = args.weight.cols;
    a.m = static_cast<int>(args.m);
    a.n = N;
    a.blocks = static_cast<int>(tile_chunks(args.weight.cols)) * kTileBlocks;
    a.vector_x = rows_in_vectors(args);
    static Raised arrange_raised;
    launch<ArrangeParams>("arrange", arrange_kernel<T>, arrange_raised, a,
                          dim3((static_cast<unsigned>(a.blocks) * N + kArrangeThreads - 1) / kArrangeThreads),
                          kArrangeThreads, 0, device, stream);
    GemmParams p = gemm_params(args, plan.blocks_per_group, plan.splits);
    p.x = args.staging;
    static Raised raised;
    launch<GemmParams>("wide", wide_kernel<T, K, N, Groups>, raised, p,
                       dim3(static_cast<unsigned>(args.weight.groups) * plan.blocks_per_group * plan.splits),
                       Layout::kThreads, Layout::kBytes, device, stream);
}

template <typename T, int K>
void launch_wide_k(const TileMatmulArgs& args, int device, cudaStream_t stream) {
    const int n = instance_rows(args.m);
    const WidePlan plan = plan_wide(static_cast<int>(row_tiles(args.weight.rows / args.weight.groups)), n,
                                    static_cast<int>(tile_chunks(args.weight.cols)),
                                    static_cast<int>(args.weight.groups), device_facts(device).multiprocessors);
    if (n == 32 && plan.groups == 4) return launch_wide<T, K, 32, 4>(args, plan, device, stream);
    if (n == 32) return launch_wide<T, K, 32, 2>(args, plan, device, stream);
    if (n == 64 && plan.groups == 4) return launch_wide<T, K, 64, 4>(args, plan, device, stream);
    if (n == 64) return launch_wide<T, K, 64, 2>(args, plan, device, stream);
    if (n == 128) return launch_wide<T, K, 128, 2>(args, plan, device, stream);
    launch_wide<T, K, 256, 2>(args, plan, device, stream);
}

}  // namespace
}  // namespace matmul

int64_t wide_staging_bytes(int64_t m, int64_t rows, int64_t cols, int device) {
    using namespace matmul;
    if (!kBuilt || m < kLeastRows || device_facts(device).capability != 90) return 0;
    if (m <= kSlowerForSmall && rows * cols < kSmall) return 0;
    return tile_chunks(cols) * kTileCols * instance_rows(std::min<int64_t>(m, kWideSlice)) * 2;
}

void wide_cuda(const TileMatmulArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    matmul::with_instance("wide", args, [&](auto type, auto bits) {
        matmul::launch_wide_k<typename decltype(type)::Type, bits>(args, device, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace kbitq
