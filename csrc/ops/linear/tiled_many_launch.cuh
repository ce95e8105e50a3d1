// How a product is launched by the kernel of tiled_many.cuh, for one list of codecs (tiled_many_*_cuda.cu).
#pragma once

#include <algorithm>

#include "ops/linear/tiled_dispatch.cuh"
#include "ops/linear/tiled_launch.cuh"
#include "ops/linear/tiled_many.cuh"

namespace kbitq::tiled {

struct ManyPlan {
    int warps = 0, splits = 0, blocks_per_group = 0;
};

// The cut of least cost: the rounds of chunks of the busiest multiprocessor, times the row tiles of a CTA.
inline ManyPlan plan_many(int tiles_per_group, int warp_tiles, int max_warps, int chunks, int groups,
                          int multiprocessors, int max_splits) {
    constexpr int kSplitCost = 12, kLeastBusyTiles = 14;
    ManyPlan best;
    int64_t least = INT64_MAX;
    const int most = std::min(max_warps, (tiles_per_group + warp_tiles - 1) / warp_tiles);
    for (int warps = most; warps >= std::min(max_warps / 2, most); --warps) {
        const int blocks_per_group = (tiles_per_group + warps * warp_tiles - 1) / (warps * warp_tiles);
        for (int splits = 1; splits <= std::min(max_splits, chunks); ++splits) {
            const int64_t blocks = static_cast<int64_t>(blocks_per_group) * groups;
            if (splits > 1 && (blocks * splits > multiprocessors || blocks * warps > kTiledCounters)) break;
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

template <typename T, class Decoder, int NT>
void launch_many(const TiledLinearArgs& args, const ExpertArgs& experts, int device, cudaStream_t stream) {
    const DeviceFacts& facts = device_facts(device);
    const int64_t rows = args.weight.rows / args.weight.groups;
    const int tiles_per_group = static_cast<int>(row_tiles(rows)),
              chunks = static_cast<int>(tile_chunks(args.weight.cols));
    const int max_splits = experts.offsets ? 1 : chunks;  // partial sums have room for one slice of x
    using Layout = ManyLayout<Decoder, NT>;
    const ManyPlan plan = plan_many(tiles_per_group, Layout::kTiles, Layout::kMaxWarps, chunks,
                                    static_cast<int>(args.weight.groups), facts.multiprocessors, max_splits);
    TiledParams p = tiled_params(args, plan.blocks_per_group, plan.splits);
    p.x = args.x;
    p.vector_x = rows_in_vectors(args);
    p.offsets = experts.offsets;
    p.rows = args.weight.rows / experts.experts;
    p.groups_per_expert = static_cast<int>(args.weight.groups / experts.experts);
    const dim3 grid(static_cast<unsigned>(args.weight.groups) * plan.blocks_per_group * plan.splits);
    static Raised raised;
    launch<TiledParams>("many", many_kernel<T, Decoder, NT>, raised, p, grid, plan.warps * 32,
                        Layout::bytes(plan.warps), device, stream);
}

// The instances: the rows of x that each has room for, in ascending order.
using ManyLauncher = void (*)(const TiledLinearArgs&, const ExpertArgs&, int, cudaStream_t);
struct ManyInstance {
    int rows;
    ManyLauncher launch;
};
template <typename T, class Decoder>
constexpr ManyInstance kManyInstances[] = {{8, launch_many<T, Decoder, 1>},
                                           {16, launch_many<T, Decoder, 2>},
                                           {32, launch_many<T, Decoder, 4>},
                                           {kManyRows, launch_many<T, Decoder, kManyRows / 8>}};

// m: the rows of x that are expected to use one weight; above kManyRows an expert's rows are taken in slices. Codecs:
// the list that has the codec of the tiles.
template <class Codecs>
void many_product(const TiledLinearArgs& args, const ExpertArgs& experts, int64_t m, int device, cudaStream_t stream) {
    with_instance<Codecs>(args, [&](auto element, auto codec) {
        using T = typename decltype(element)::Type;
        const auto& instances = kManyInstances<T, typename decltype(codec)::template Many<T>>;
        const ManyInstance* chosen = instances;
        while (chosen->rows < m && chosen + 1 < std::end(instances)) ++chosen;
        chosen->launch(args, experts, device, stream);
    });
}

}  // namespace kbitq::tiled
