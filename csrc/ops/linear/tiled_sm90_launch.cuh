// How a product is launched by the kernel of tiled_sm90.cuh, for one list of codecs (tiled_sm90_*_cuda.cu).
#pragma once

#include <algorithm>

#include "ops/linear/tiled_dispatch.cuh"
#include "ops/linear/tiled_launch.cuh"
#include "ops/linear/tiled_sm90.cuh"

namespace kbitq::tiled {

// Rows of x of the smallest instance for m.
inline int instance_rows(int64_t m) { return m <= 32 ? 32 : m <= 64 ? 64 : m <= 128 ? 128 : 256; }

struct Sm90Plan {
    int warpgroups = 0, splits = 0, blocks_per_group = 0;
};

// Hundredths of a microsecond that a chunk takes a CTA of so many warpgroups, on an H200.
inline int chunk_time(int n, int warpgroups) {
    if (n <= 32) return warpgroups == 2 ? 93 : 141;
    if (n <= 64) return warpgroups == 2 ? 117 : 183;
    return n <= 128 ? 188 : 274;
}

// The cut of least time: that of the busiest multiprocessor, and that of adding up what several CTAs have.
inline Sm90Plan plan_sm90(int tiles_per_group, int n, int chunks, int groups, int multiprocessors) {
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
    using Decoder = typename Codec::template Sm90<T, N>;
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
    launch<ArrangeParams>("arrange", arrange_kernel<T, Codec::kWholeBlocks>, arrange_raised, a,
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
struct Sm90Instance {
    int rows, warpgroups;
    void (*launch)(const TiledLinearArgs&, const Sm90Plan&, int, cudaStream_t);
};
template <typename T, class Codec>
constexpr Sm90Instance kSm90Instances[] = {
    {32, 4, launch_sm90<T, Codec, 32, 4>},   {32, 2, launch_sm90<T, Codec, 32, 2>},
    {64, 4, launch_sm90<T, Codec, 64, 4>},   {64, 2, launch_sm90<T, Codec, 64, 2>},
    {128, 2, launch_sm90<T, Codec, 128, 2>}, {256, 2, launch_sm90<T, Codec, 256, 2>}};

template <typename T, class Codec>
void launch_any_sm90(const TiledLinearArgs& args, int device, cudaStream_t stream) {
    const int n = instance_rows(args.m);
    const int tiles_per_group = static_cast<int>(row_tiles(args.weight.rows / args.weight.groups));
    const Sm90Plan plan = plan_sm90(tiles_per_group, n, static_cast<int>(tile_chunks(args.weight.cols)),
                                    static_cast<int>(args.weight.groups), device_facts(device).multiprocessors);
    for (const Sm90Instance& instance : kSm90Instances<T, Codec>) {
        if (instance.rows == n && instance.warpgroups == plan.warpgroups)
            return instance.launch(args, plan, device, stream);
    }
}

// m <= kSm90Rows rows of x. Codecs: the list that has the codec of the tiles.
template <class Codecs>
void sm90_product(const TiledLinearArgs& args, int device, cudaStream_t stream) {
    with_instance<Codecs>(args, [&](auto element, auto codec) {
        launch_any_sm90<typename decltype(element)::Type, decltype(codec)>(args, device, stream);
    });
}

}  // namespace kbitq::tiled
