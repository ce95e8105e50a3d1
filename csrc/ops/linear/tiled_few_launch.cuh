// How a product is launched by the kernel of tiled_few.cuh, for one list of codecs (tiled_few_*_cuda.cu).
#pragma once

#include <algorithm>

#include "ops/linear/tiled_dispatch.cuh"
#include "ops/linear/tiled_few.cuh"
#include "ops/linear/tiled_launch.cuh"

namespace kbitq::tiled {

// The device as the cut sees it.
const FewCard& few_card(int device);

// The plan, remembered for some tens of shapes, because plan_few takes microseconds.
template <class Decoder, int MP>
const FewPlan& known_plan(const FewWork& work, int device) {
    constexpr int kPlaces = 64;
    struct Known {
        FewWork work{};
        int device = -1;
        FewPlan plan;
    };
    static thread_local Known known[kPlaces];
    const unsigned mixed = work.tiles_per_group * 2654435761u ^ work.chunks * 40503u ^ (work.groups * 16 + work.m);
    Known& place = known[(mixed ^ mixed >> 16) % kPlaces];
    if (place.device != device || !(place.work == work)) {
        place = {work, device, plan_few(kFewSizes<Decoder, MP>, work, few_card(device))};
    }
    return place.plan;
}

template <typename T, class Decoder, int MP, bool Totals>
void launch_few(const FewParams& params, const FewPlan& plan, int64_t groups, int device, cudaStream_t stream) {
    static Raised raised;
    launch<FewParams>("few", few_kernel<T, Decoder, MP, Totals>, raised, params,
                      dim3(static_cast<unsigned>(plan.parts) << plan.split_shift, static_cast<unsigned>(groups)),
                      plan.warps * 32, plan.bytes(kFewSizes<Decoder, MP>), device, stream,
                      plan.cluster ? plan.splits() : 1);
}

template <class Decoder>
FewParams few_params(const TiledLinearArgs& args, const FewWork& work, const FewPlan& plan) {
    const int64_t bytes = Decoder::kRecordBytes;
    FewParams p{};
    p.x = args.x;
    p.tiles = reinterpret_cast<const uint8_t*>(args.weight.words);
    p.codebook = args.weight.codebook;
    p.bias = args.bias;
    p.y = args.y;
    p.partial = args.workspace;
    p.counters = args.counters;
    p.rows = args.weight.rows;
    p.cols = args.weight.cols;
    p.m = work.m;
    p.tiles_per_group = work.tiles_per_group;
    p.parts = plan.parts;
    p.part_tiles = work.tiles_per_group / plan.parts;
    p.longer = work.tiles_per_group % plan.parts;
    p.chunks = work.chunks;
    p.split_shift = plan.split_shift;
    p.team_shift = plan.team_shift;
    p.team_warps = plan.warps >> plan.team_shift;
    p.tile_step = bytes * work.chunks << plan.team_shift;
    p.pass_step = bytes * p.team_warps << plan.split_shift;
    p.passes = plan.passes;
    p.batch = plan.batch;
    p.total_tiles = plan.total_tiles;
    p.cluster = plan.cluster;
    p.vector_x = rows_in_vectors(args);
    p.whole_chunks = p.vector_x ? static_cast<int>(args.weight.cols / kTileCols) : 0;
    return p;
}

// Launches an instance; false if it does not fit this card.
template <typename T, class Decoder, int MP>
bool try_few(const TiledLinearArgs& args, int device, cudaStream_t stream) {
    const FewWork work{static_cast<int>(row_tiles(args.weight.rows / args.weight.groups)),
                       static_cast<int>(args.weight.groups), static_cast<int>(tile_chunks(args.weight.cols)),
                       static_cast<int>(args.m)};
    const FewPlan& plan = known_plan<Decoder, MP>(work, device);
    if (plan.warps == 0) return false;
    const FewParams p = few_params<Decoder>(args, work, plan);
    if (plan.total_tiles > 0) {
        launch_few<T, Decoder, MP, true>(p, plan, args.weight.groups, device, stream);
    } else {
        launch_few<T, Decoder, MP, false>(p, plan, args.weight.groups, device, stream);
    }
    return true;
}

// m <= kFewRows rows of x. Codecs: the list that has the codec of the tiles.
template <class Codecs>
void few_product(const TiledLinearArgs& args, int device, cudaStream_t stream) {
    with_instance<Codecs>(args, [&](auto element, auto codec) {
        using T = typename decltype(element)::Type;
        using Codec = decltype(codec);
        with_few_rows<Codec::kWholeBlocks>(args.m, [&](auto mp) {
            using Usual = typename Codec::template Few<T, mp>;
            using Smaller = typename Codec::template FewSmaller<T, mp>;
            if (try_few<T, Usual, mp>(args, device, stream)) return;
            if (!std::is_same_v<Usual, Smaller> && try_few<T, Smaller, mp>(args, device, stream)) return;
            throw std::runtime_error("few: does not fit this device's shared memory");
        });
    });
}

}  // namespace kbitq::tiled
