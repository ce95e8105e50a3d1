// The launcher of matmul_gemv.cuh: how the work is cut, and the table of instances.
#include "ops/matmul.h"

#include <algorithm>

#include "cuda/matmul_launch.cuh"
#include "ops/matmul_gemv.cuh"

namespace kbitq {
namespace matmul {
namespace {

// Stages of a warp's ring: as many as fit beside the table, four at most.
template <int K, int MP>
constexpr int kGemvStages = K <= 3                               ? 4
                            : K == 5 && kGemvCopies<K, MP> == 32 ? 2
                                                                 : 3;

struct GemvPlan {
    int warps = 0, splits = 0, parts = 0, tiles = 0;
};

// Do the partial sums of so many splits fit the workspace (matmul_workspace_bytes), and their counters?
bool splits_fit(int64_t tiles, int64_t parts, int splits, int multiprocessors) {
    constexpr int kTilesPerMultiprocessor = kGemvMaxWarps * kGemmSlice / kGemvMaxBatch;
    return tiles * splits <= static_cast<int64_t>(multiprocessors) * kTilesPerMultiprocessor &&
           parts <= kMatmulCounters;
}

// Rounds of records that the busiest multiprocessor goes through, least for the best cut. Sharing a part between CTAs
// costs a trip through global memory, about as long as kSplitCost records take.
GemvPlan plan_gemv(int tiles_per_group, int chunks, int groups, int multiprocessors) {
    constexpr int kSplitCost = 24, kMaxSplits = 8;
    GemvPlan best;
    int64_t least = INT64_MAX;
    for (int splits = 1; splits <= std::min(kMaxSplits, chunks); ++splits) {
        const int parts = std::clamp(multiprocessors / (splits * groups), 1, tiles_per_group);
        const int tiles = (tiles_per_group + parts - 1) / parts;
        const int waves = (groups * parts * splits + multiprocessors - 1) / multiprocessors;
        if (splits > 1 &&
            !splits_fit(static_cast<int64_t>(tiles_per_group) * groups, parts * groups, splits, multiprocessors))
            break;
        for (int warps = kGemvMaxWarps; warps >= 4; --warps) {
            const int64_t passes = (chunks + warps * splits - 1) / (warps * splits);
            const int64_t cost = passes * tiles * waves * std::max(warps, 8) + (splits > 1 ? kSplitCost : 0);
            if (cost < least) {
                least = cost;
                best = {warps, splits, parts, tiles};
            }
        }
    }
    return best;
}

template <typename T, int K, int MP>
void launch_gemv(const TileMatmulArgs& args, int device, cudaStream_t stream) {
    constexpr int kStages = kGemvStages<K, MP>;
    const DeviceFacts& facts = device_facts(device);
    const int64_t group_rows = args.rows / args.groups;
    const GemvPlan plan = plan_gemv(static_cast<int>(row_tiles(group_rows)), static_cast<int>(tile_chunks(args.cols)),
                                    static_cast<int>(args.groups), facts.multiprocessors);
    const int ring = Table<K, kGemvCopies<K, MP>>::kBytes + plan.warps * kStages * Record<K>::kBytes;
    const int tile_sums = plan.warps * kTileRows * MP * 4;
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
    p.m = static_cast<int>(args.m);
    p.tiles_per_group = static_cast<int>(row_tiles(group_rows));
    p.parts = plan.parts;
    p.chunks = static_cast<int>(tile_chunks(args.cols));
    p.splits = plan.splits;
    p.batch = std::max(1, std::min(plan.tiles, (facts.shared_bytes - ring) / tile_sums));
    p.vector_x = args.cols % 8 == 0 && reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
    static Raised raised;
    launch<GemvParams>("gemv", gemv_kernel<T, K, MP, kStages>, raised, p,
                       dim3(static_cast<unsigned>(args.groups) * plan.parts * plan.splits), plan.warps * 32,
                       ring + p.batch * tile_sums, device, stream);
}

template <typename T, int K>
void launch_gemv_k(const TileMatmulArgs& args, int device, cudaStream_t stream) {
    if (args.m == 1) return launch_gemv<T, K, 1>(args, device, stream);
    if (args.m == 2) return launch_gemv<T, K, 2>(args, device, stream);
    if (args.m <= 4) return launch_gemv<T, K, 4>(args, device, stream);
    return launch_gemv<T, K, 8>(args, device, stream);
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

bool matmul_ready(int device) {
    if (matmul::device_facts(device).capability < kMatmulCapability) return false;
    const DeviceGuard guard(device);
    const auto kernel = matmul::gemv_kernel<__nv_bfloat16, 2, 1, matmul::kGemvStages<2, 1>>;
    cudaFuncAttributes attributes = {};
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "gemv", "attributes");
    return attributes.ptxVersion >= kMatmulCapability;
}

void gemv_cuda(const TileMatmulArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    const auto on = static_cast<cudaStream_t>(stream);
    if (args.dtype == DType::f16) return matmul::launch_gemv_t<__half>(args, device, on);
    matmul::launch_gemv_t<__nv_bfloat16>(args, device, on);
}

}  // namespace kbitq
