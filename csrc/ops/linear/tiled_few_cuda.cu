// The launcher of tiled_few.cuh: how the work is cut, and the table of instances.
#include "ops/linear/tiled.h"

#include <algorithm>
#include <mutex>

#include "ops/linear/tiled_dispatch.cuh"
#include "ops/linear/tiled_few.cuh"
#include "ops/linear/tiled_few_plan.h"
#include "ops/linear/tiled_launch.cuh"

namespace kbitq {
namespace matmul {
namespace {

// Clusters of so many CTAs, each with a multiprocessor for itself, that run at a time; 0 where there are none.
int clusters_of(int device, int size) {
    if (device_facts(device).capability < 90) return 0;
    const auto kernel = reinterpret_cast<const void*>(gemv_kernel<__nv_bfloat16, 2, 1, 32, true>);
    const int bytes = device_facts(device).shared_bytes;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "gemv", "cluster");
    cudaLaunchAttribute shape = {};
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim.x = size;
    shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size);
    config.blockDim = dim3(kGemvMaxWarps * 32);
    config.dynamicSmemBytes = bytes;
    config.attrs = &shape;
    config.numAttrs = 1;
    int count = 0;
    check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "gemv", "cluster");
    return std::max(count, 0);
}

// The device as the cut sees it.
const GemvCard& gemv_card(int device) {
    static GemvCard cards[kMaxDevices];
    static std::once_flag once[kMaxDevices];
    const DeviceFacts& facts = device_facts(device);
    std::call_once(once[device], [&] {
        GemvCard& card = cards[device];
        card.multiprocessors = facts.multiprocessors;
        card.shared_bytes = facts.shared_bytes;
        for (int shift = 1; shift <= kGemvMaxSplitShift; ++shift)
            card.clusters[shift] = clusters_of(device, 1 << shift);
    });
    return cards[device];
}

// plan_gemv, which takes microseconds, once for each of some tens of shapes.
template <int K, int MP, int Copies>
const GemvPlan& known_plan(const GemvWork& work, int device) {
    constexpr int kPlaces = 64;
    struct Known {
        GemvWork work{};
        int device = -1;
        GemvPlan plan;
    };
    static thread_local Known known[kPlaces];
    const unsigned mixed = work.tiles_per_group * 2654435761u ^ work.chunks * 40503u ^ (work.groups * 16 + work.m);
    Known& place = known[(mixed ^ mixed >> 16) % kPlaces];
    if (place.device != device || !(place.work == work)) {
        place = {work, device, plan_gemv(kGemvSizes<K, MP, Copies>, work, gemv_card(device))};
    }
    return place.plan;
}

template <typename T, int K, int MP, int Copies, bool Totals>
void launch_gemv(const GemvParams& params, const GemvPlan& plan, int64_t groups, int device, cudaStream_t stream) {
    static Raised raised;
    launch<GemvParams>("gemv", gemv_kernel<T, K, MP, Copies, Totals>, raised, params,
                       dim3(static_cast<unsigned>(plan.parts) << plan.split_shift, static_cast<unsigned>(groups)),
                       plan.warps * 32, plan.bytes(kGemvSizes<K, MP, Copies>), device, stream,
                       plan.cluster ? plan.splits() : 1);
}

template <typename T, int K, int MP, int Copies = GemvLayout<K, MP>::kCopies>
void launch_gemv_mp(const TileMatmulArgs& args, int device, cudaStream_t stream) {
    const GemvWork work{static_cast<int>(row_tiles(args.weight.rows / args.weight.groups)),
                        static_cast<int>(args.weight.groups), static_cast<int>(tile_chunks(args.weight.cols)),
                        static_cast<int>(args.m)};
    const GemvPlan& plan = known_plan<K, MP, Copies>(work, device);
    if constexpr (K == 5 && Copies == 32) {  // a card with less shared memory: half the table
        if (plan.warps == 0) return launch_gemv_mp<T, K, MP, 16>(args, device, stream);
    }
    if (plan.warps == 0) throw std::runtime_error("gemv: does not fit this device's shared memory");
    const int64_t bytes = Record<K>::kBytes;
    GemvParams p{};
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
    p.lane_shift = plan.lane_shift;
    p.lane_warps = plan.warps >> plan.lane_shift;
    p.tile_step = bytes * work.chunks << plan.lane_shift;
    p.pass_step = bytes * p.lane_warps << plan.split_shift;
    p.passes = plan.passes;
    p.batch = plan.batch;
    p.total_tiles = plan.total_tiles;
    p.cluster = plan.cluster;
    p.vector_x = rows_in_vectors(args);
    p.whole_chunks = p.vector_x ? static_cast<int>(args.weight.cols / kTileCols) : 0;
    if (plan.total_tiles > 0) return launch_gemv<T, K, MP, Copies, true>(p, plan, args.weight.groups, device, stream);
    launch_gemv<T, K, MP, Copies, false>(p, plan, args.weight.groups, device, stream);
}

}  // namespace
}  // namespace matmul

int64_t matmul_rows(int device) {
    using namespace matmul;
    if (device_facts(device).capability < kMatmulCapability) return 0;
    const DeviceGuard guard(device);
    const auto kernel = gemv_kernel<__nv_bfloat16, 2, 1, GemvLayout<2, 1>::kCopies, false>;
    cudaFuncAttributes attributes = {};
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "gemv", "attributes");
    if (attributes.ptxVersion < kMatmulCapability) return 0;
    return device_facts(device).shared_bytes >= kBlockShared ? INT64_MAX : kGemvMaxBatch;
}

void gemv_cuda(const TileMatmulArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    matmul::with_instance("gemv", args, [&](auto type, auto bits) {
        matmul::with_gemv_rows(args.m, [&](auto mp) {
            matmul::launch_gemv_mp<typename decltype(type)::Type, bits, mp>(args, device,
                                                                            static_cast<cudaStream_t>(stream));
        });
    });
}

}  // namespace kbitq
