// The launcher of tiled_sm90.cuh: how the work is cut, and the table of instances.
#include "ops/linear/tiled.h"

#include <algorithm>

#include "ops/linear/tiled_dispatch.cuh"
#include "ops/linear/tiled_launch.cuh"
#include "ops/linear/tiled_sm90.cuh"

namespace kbitq {
namespace tiled {
namespace {

// Whether the compiler was asked for sm_90a (csrc/cmake/cuda.cmake): without it the kernels only trap.
#if defined(KBITQ_SM90A)
constexpr bool kBuilt = true;
#else
constexpr bool kBuilt = false;
#endif

constexpr int kLeastRows = 17;                // of x; with fewer, few is as fast
constexpr int kSlowerForSmall = 32;           // with so many rows of x or fewer, many is as fast for a small weight
constexpr int64_t kSmall = int64_t{5} << 22;  // elements

// Rows of x of the smallest instance for m.
int instance_rows(int64_t m) { return m <= 32 ? 32 : m <= 64 ? 64 : m <= 128 ? 128 : 256; }

struct Sm90Plan {
    int warpgroups = 0, splits = 0, blocks_per_group = 0;
};

// Hundredths of a microsecond that a chunk takes a CTA of so many warpgroups, on an H200.
int chunk_time(int n, int warpgroups) {
    if (n <= 32) return warpgroups == 2 ? 93 : 141;
    if (n <= 64) return warpgroups == 2 ? 117 : 183;
    return n <= 128 ? 188 : 274;
}

// The cut of least time: that of the busiest multiprocessor, and that of adding up what several CTAs have.
Sm90Plan plan_sm90(int tiles_per_group, int n, int chunks, int groups, int multiprocessors) {
    constexpr int kSplitTime = 110, kMaxSplits = 8;  // for 64 rows of x
    Sm90Plan best;
    int64_t least = INT64_MAX;
    for (int warpgroups = n <= 64 ? 4 : 2; warpgroups >= 2; warpgroups -= 2) {
        const int warps = warpgroups * 4, blocks_per_group = (tiles_per_group + warps - 1) / warps;
        const int64_t blocks = static_cast<int64_t>(blocks_per_group) * groups;
        for (int splits = 1; splits <= std::min(kMaxSplits, chunks); ++splits) {
            if (splits > 1 && (blocks * splits > multiprocessors || blocks * warps > kTiledCounters)) break;
            const int64_t waves = (blocks * splits + multiprocessors - 1) / multiprocessors;
            const int64_t time = waves * ((chunks + splits - 1) / splits) * chunk_time(n, warpgroups) +
                                 (splits > 1 ? kSplitTime * splits * std::max(n, 32) / 64 : 0);
            if (time < least) {
                least = time;
                best = {warpgroups, splits, blocks_per_group};
            }
        }
    }
    return best;
}

template <typename T, class Codec, int N, int Warpgroups>
void launch_sm90(const TiledLinearArgs& args, const Sm90Plan& plan, int device, cudaStream_t stream) {
    using Decoder = typename Codec::template Sm90<N>;
    using Layout = Sm90Layout<Decoder, N, Warpgroups>;
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
    TiledParams p = tiled_params(args, plan.blocks_per_group, plan.splits);
    p.x = args.staging;
    static Raised raised;
    launch<TiledParams>("sm90", sm90_kernel<T, Decoder, N, Warpgroups>, raised, p,
                        dim3(static_cast<unsigned>(args.weight.groups) * plan.blocks_per_group * plan.splits),
                        Layout::kThreads, Layout::kBytes, device, stream);
}

// The instances: rows of x, warpgroups of a CTA.
struct Instance {
    int rows, warpgroups;
    void (*launch)(const TiledLinearArgs&, const Sm90Plan&, int, cudaStream_t);
};
template <typename T, class Codec>
constexpr Instance kInstances[] = {{32, 4, launch_sm90<T, Codec, 32, 4>},   {32, 2, launch_sm90<T, Codec, 32, 2>},
                                   {64, 4, launch_sm90<T, Codec, 64, 4>},   {64, 2, launch_sm90<T, Codec, 64, 2>},
                                   {128, 2, launch_sm90<T, Codec, 128, 2>}, {256, 2, launch_sm90<T, Codec, 256, 2>}};

template <typename T, class Codec>
void launch_any(const TiledLinearArgs& args, int device, cudaStream_t stream) {
    const int n = instance_rows(args.m);
    const int tiles_per_group = static_cast<int>(row_tiles(args.weight.rows / args.weight.groups));
    const Sm90Plan plan = plan_sm90(tiles_per_group, n, static_cast<int>(tile_chunks(args.weight.cols)),
                                    static_cast<int>(args.weight.groups), device_facts(device).multiprocessors);
    for (const Instance& instance : kInstances<T, Codec>) {
        if (instance.rows == n && instance.warpgroups == plan.warpgroups)
            return instance.launch(args, plan, device, stream);
    }
}

}  // namespace
}  // namespace tiled

int64_t tiled_staging_bytes(int64_t m, int64_t rows, int64_t cols, int device) {
    using namespace tiled;
    if (!kBuilt || m < kLeastRows || device_facts(device).capability != 90) return 0;
    if (m <= kSlowerForSmall && rows * cols < kSmall) return 0;
    return tile_chunks(cols) * kTileCols * instance_rows(std::min<int64_t>(m, kSm90Rows)) * 2;
}

void tiled_sm90_cuda(const TiledLinearArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    tiled::with_instance("sm90", args, [&](auto element, auto codec) {
        tiled::launch_any<typename decltype(element)::Type, decltype(codec)>(args, device,
                                                                             static_cast<cudaStream_t>(stream));
    });
}

}  // namespace kbitq
