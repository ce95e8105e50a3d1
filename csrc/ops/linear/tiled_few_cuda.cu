// The launcher of tiled_few.cuh: how the work is cut, and the table of instances.
#include "ops/linear/tiled.h"

#include <algorithm>
#include <mutex>

#include "ops/linear/tiled_dispatch.cuh"
#include "ops/linear/tiled_few.cuh"
#include "ops/linear/tiled_launch.cuh"

namespace kbitq {
namespace tiled {
namespace {

// How many clusters of so many CTAs, each on a multiprocessor of its own, run at a time; 0 on cards without clusters.
int clusters_of(int device, int size) {
    if (device_facts(device).capability < 90) return 0;
    const auto kernel = reinterpret_cast<const void*>(few_kernel<__nv_bfloat16, OneCodec::Few<1>, 1, true>);
    const int bytes = device_facts(device).shared_bytes;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "few", "cluster");
    cudaLaunchAttribute shape = {};
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim.x = size;
    shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size);
    config.blockDim = dim3(kFewMaxWarps * 32);
    config.dynamicSmemBytes = bytes;
    config.attrs = &shape;
    config.numAttrs = 1;
    int count = 0;
    check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "few", "cluster");
    return std::max(count, 0);
}

// The device as the cut sees it.
const FewCard& few_card(int device) {
    static FewCard cards[kMaxDevices];
    static std::once_flag once[kMaxDevices];
    const DeviceFacts& facts = device_facts(device);
    std::call_once(once[device], [&] {
        FewCard& card = cards[device];
        card.multiprocessors = facts.multiprocessors;
        card.shared_bytes = facts.shared_bytes;
        for (int shift = 1; shift <= kFewMaxSplitShift; ++shift) card.clusters[shift] = clusters_of(device, 1 << shift);
    });
    return cards[device];
}

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

}  // namespace
}  // namespace tiled

int64_t tiled_linear_rows(int device) {
    using namespace tiled;
    if (device_facts(device).capability < kTiledCapability) return 0;
    const DeviceGuard guard(device);
    const auto kernel = few_kernel<__nv_bfloat16, OneCodec::Few<1>, 1, false>;
    cudaFuncAttributes attributes = {};
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "few", "attributes");
    if (attributes.ptxVersion < kTiledCapability) return 0;
    return device_facts(device).shared_bytes >= kBlockShared ? INT64_MAX : kFewRows;
}

void tiled_few_cuda(const TiledLinearArgs& args, int device, void* stream) {
    using namespace tiled;
    const DeviceGuard guard(device);
    const auto on = static_cast<cudaStream_t>(stream);
    with_instance("few", args, [&](auto element, auto codec) {
        using T = typename decltype(element)::Type;
        using Codec = decltype(codec);
        with_few_rows(args.m, [&](auto mp) {
            using Usual = typename Codec::template Few<mp>;
            using Smaller = typename Codec::template FewSmaller<mp>;
            if (try_few<T, Usual, mp>(args, device, on)) return;
            if (!std::is_same_v<Usual, Smaller> && try_few<T, Smaller, mp>(args, device, on)) return;
            throw std::runtime_error("few: does not fit this device's shared memory");
        });
    });
}

}  // namespace kbitq
