// The launcher of matmul_gemv.cuh: how the work is cut, and the table of instances.
#include "ops/matmul.h"

#include <algorithm>

#include "cuda/matmul_launch.cuh"
#include "ops/matmul_gemv.cuh"

namespace kbitq {
namespace matmul {
namespace {

// What an instance needs of shared memory.
struct GemvSizes {
    int table, ring;  // bytes; of the ring for each warp
    int mp;
    int sums() const { return kTileRows * mp * 4; }  // bytes, of a row tile
};

// The matrix as the cut sees it.
struct GemvWork {
    int tiles_per_group = 0, groups = 0, chunks = 0, m = 0;
    bool operator==(const GemvWork& other) const {
        return tiles_per_group == other.tiles_per_group && groups == other.groups && chunks == other.chunks &&
               m == other.m;
    }
};

struct GemvPlan {
    int warps = 0, lane_shift = 0, split_shift = 0, parts = 0, passes = 0, batch = 0, total_tiles = 0;
    bool cluster = false;
    int lanes() const { return 1 << lane_shift; }
    int splits() const { return 1 << split_shift; }
    int bytes(const GemvSizes& sizes) const {
        return sizes.table + warps * sizes.ring + (total_tiles + batch * (warps / lanes())) * sizes.sums();
    }
};

// Clusters of so many CTAs, each with a multiprocessor for itself, that run at a time; 0 where there are none.
int clusters_at_a_time(int device, int size) {
    static int known[kMaxDevices][kGemvMaxSplits + 1];
    if (device_facts(device).capability < 90) return 0;
    if (known[device][size] == 0) {
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
        known[device][size] = count > 0 ? count : -1;
    }
    return std::max(known[device][size], 0);
}

// Do the partial sums of so many splits fit the workspace (matmul_workspace_bytes), and their counters?
bool splits_fit(const GemvWork& work, int parts, int splits, int device) {
    const int64_t sums = static_cast<int64_t>(work.tiles_per_group) * work.groups * kTileRows * work.m * splits;
    return sums * 4 <= matmul_workspace_bytes(device) && parts * work.groups <= kMatmulCounters;
}

// Row tiles between two sums over the warps, and the places for totals that it takes; false if nothing fits.
bool place_sums(GemvPlan& plan, const GemvSizes& sizes, int tiles, int shared_bytes) {
    const int lanes = plan.lanes(), of_batch = plan.warps / lanes * sizes.sums();
    const auto batch = [&](int places) {
        const int room = shared_bytes - sizes.table - plan.warps * sizes.ring - places * sizes.sums();
        return std::min((tiles + lanes - 1) / lanes, std::max(room, 0) / (of_batch * lanes)) * lanes;
    };
    plan.total_tiles = 0;
    plan.batch = batch(0);
    if (plan.split_shift > 0 || (plan.passes > 1 && plan.batch < tiles)) plan.batch = batch(plan.total_tiles = tiles);
    return plan.batch > 0;
}

// In hundredths of the time that a multiprocessor takes for a record, fitted to an H200: the records of the busiest one
// (its four schedulers have whole warps), the activations that its warps fetch, its sums.
int64_t gemv_cost(const GemvPlan& plan, const GemvSizes& sizes, int tiles, int waves) {
    const int lanes = plan.lanes(), warps = std::max((plan.warps + 3) / 4 * 4, 8);
    const int64_t records = static_cast<int64_t>(plan.passes) * ((tiles + lanes - 1) / lanes) * warps;
    int each = 100;
    if (sizes.mp <= 4) each += 3 * (16 - warps);
    if (sizes.mp == 8) each += warps == 12 ? 0 : warps > 12 ? 15 : 14;
    if (sizes.mp == 16) each += (16 - warps) * 8 / 5;
    const int activations = plan.passes * (sizes.mp <= 4 ? warps : plan.warps) * (40 + 3 * sizes.mp);
    const int syncs = ((tiles + plan.batch - 1) / plan.batch - 1) * (plan.total_tiles ? plan.passes : 1);
    const int splits = plan.split_shift == 0 ? 0 : plan.cluster ? 1800 : 3000;
    return waves * (records * each + activations + syncs * (300 + 100 * sizes.mp)) + splits;
}

// The least cost among the cuts that fit, with `rounds` times as many parts as run at a time.
GemvPlan plan_gemv(const GemvSizes& sizes, const GemvWork& work, int device, int rounds = 1) {
    constexpr int kMaxRounds = 64;
    const int most_lanes = work.chunks <= 4 ? 8 : 2;
    const DeviceFacts& facts = device_facts(device);
    GemvPlan best;
    int64_t least = INT64_MAX;
    for (int split_shift = 0; 1 << split_shift <= std::min(kGemvMaxSplits, work.chunks); ++split_shift) {
        const int splits = 1 << split_shift, clusters = split_shift > 0 ? clusters_at_a_time(device, splits) : 0;
        const int at_a_time = clusters > 0 ? clusters : std::max(facts.multiprocessors / splits, 1);
        const int parts = std::clamp(at_a_time * rounds / work.groups, 1, work.tiles_per_group);
        const int tiles = (work.tiles_per_group + parts - 1) / parts;
        const int waves = (work.groups * parts + at_a_time - 1) / at_a_time;
        if (split_shift > 0 && clusters == 0 && !splits_fit(work, parts, splits, device)) break;
        for (int lane_shift = 0; 1 << lane_shift <= std::min(most_lanes, tiles); ++lane_shift) {
            for (int warps = kGemvMaxWarps; warps >= std::max(4, 1 << lane_shift); warps -= 1 << lane_shift) {
                const int side_by_side = (warps >> lane_shift) * splits;
                GemvPlan plan;
                plan.warps = warps;
                plan.lane_shift = lane_shift;
                plan.split_shift = split_shift;
                plan.parts = parts;
                plan.passes = (work.chunks + side_by_side - 1) / side_by_side;
                plan.cluster = clusters > 0;
                if (!place_sums(plan, sizes, tiles, facts.shared_bytes)) continue;
                const int64_t cost = gemv_cost(plan, sizes, tiles, waves);
                if (cost < least) {
                    least = cost;
                    best = plan;
                }
            }
        }
    }
    return best.warps == 0 && rounds < kMaxRounds ? plan_gemv(sizes, work, device, 2 * rounds) : best;
}

template <int K, int MP, int Copies>
constexpr GemvSizes kGemvSizes{Table<K, Copies>::kBytes, GemvLayout<K, MP>::kStages * Record<K>::kBytes, MP};

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
        place = {work, device, plan_gemv(kGemvSizes<K, MP, Copies>, work, device)};
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
    const GemvWork work{static_cast<int>(row_tiles(args.rows / args.groups)), static_cast<int>(args.groups),
                        static_cast<int>(tile_chunks(args.cols)), static_cast<int>(args.m)};
    const GemvPlan& plan = known_plan<K, MP, Copies>(work, device);
    if constexpr (K == 5 && Copies == 32) {  // a card with less shared memory: half the table
        if (plan.warps == 0) return launch_gemv_mp<T, K, MP, 16>(args, device, stream);
    }
    if (plan.warps == 0) throw std::runtime_error("gemv: does not fit this device's shared memory");
    const int64_t bytes = Record<K>::kBytes;
    GemvParams p{};
    p.x = args.x;
    p.tiles = reinterpret_cast<const uint8_t*>(args.tiles);
    p.codebook = args.codebook;
    p.bias = args.bias;
    p.y = args.y;
    p.partial = args.workspace;
    p.counters = args.counters;
    p.rows = args.rows;
    p.cols = args.cols;
    p.m = work.m;
    p.tiles_per_group = work.tiles_per_group;
    p.parts = plan.parts;
    p.part_tiles = work.tiles_per_group / plan.parts;
    p.longer = work.tiles_per_group % plan.parts;
    p.chunks = work.chunks;
    p.split_shift = plan.split_shift;
    p.lane_shift = plan.lane_shift;
    p.lane_warps = plan.warps >> plan.lane_shift;
    p.passes = plan.passes;
    p.tile_step = bytes * work.chunks << plan.lane_shift;
    p.pass_step = bytes * p.lane_warps << plan.split_shift;
    p.batch = plan.batch;
    p.total_tiles = plan.total_tiles;
    p.cluster = plan.cluster;
    p.vector_x = args.cols % 8 == 0 && reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
    p.whole_chunks = p.vector_x ? static_cast<int>(args.cols / kTileCols) : 0;
    if (plan.total_tiles > 0) return launch_gemv<T, K, MP, Copies, true>(p, plan, args.groups, device, stream);
    launch_gemv<T, K, MP, Copies, false>(p, plan, args.groups, device, stream);
}

template <typename T, int K>
void launch_gemv_k(const TileMatmulArgs& args, int device, cudaStream_t stream) {
    if (args.m == 1) return launch_gemv_mp<T, K, 1>(args, device, stream);
    if (args.m == 2) return launch_gemv_mp<T, K, 2>(args, device, stream);
    if (args.m <= 4) return launch_gemv_mp<T, K, 4>(args, device, stream);
    if (args.m <= 8) return launch_gemv_mp<T, K, 8>(args, device, stream);
    launch_gemv_mp<T, K, 16>(args, device, stream);
}

template <typename T>
void launch_gemv_t(const TileMatmulArgs& args, int device, cudaStream_t stream) {
    switch (args.k) {
        case 2: return launch_gemv_k<T, 2>(args, device, stream);
        case 3: return launch_gemv_k<T, 3>(args, device, stream);
        case 4: return launch_gemv_k<T, 4>(args, device, stream);
        case 5: return launch_gemv_k<T, 5>(args, device, stream);
        default: throw std::runtime_error("gemv: tiles have 2 to 5 bits");
    }
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
    const auto on = static_cast<cudaStream_t>(stream);
    if (args.dtype == DType::f16) return matmul::launch_gemv_t<__half>(args, device, on);
    matmul::launch_gemv_t<__nv_bfloat16>(args, device, on);
}

}  // namespace kbitq
