// The kernel for few rows of x: what a card can do, and the way to the list of codecs. Planes are compiled here.
#include "ops/linear/tiled.h"

#include <algorithm>
#include <mutex>

#include "ops/linear/tiled_few_launch.cuh"

namespace kbitq {
namespace tiled {

extern template void few_product<TrellisCodecs>(const TiledLinearArgs&, int, cudaStream_t);
extern template void few_product<WideTrellisCodecs>(const TiledLinearArgs&, int, cudaStream_t);

namespace {

// How many clusters of so many CTAs, each on a multiprocessor of its own, run at a time; 0 on cards without clusters.
int clusters_of(int device, int size) {
    if (device_facts(device).capability < 90) return 0;
    const auto kernel =
        reinterpret_cast<const void*>(few_kernel<__nv_bfloat16, OneCodec::Few<__nv_bfloat16, 1>, 1, true>);
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

}  // namespace

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

}  // namespace tiled

int64_t tiled_linear_rows(int device) {
    using namespace tiled;
    if (device_facts(device).capability < kTiledCapability) return 0;
    const DeviceGuard guard(device);
    const auto kernel = few_kernel<__nv_bfloat16, OneCodec::Few<__nv_bfloat16, 1>, 1, false>;
    cudaFuncAttributes attributes = {};
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "few", "attributes");
    if (attributes.ptxVersion < kTiledCapability) return 0;
    return device_facts(device).shared_bytes >= kBlockShared ? INT64_MAX : kFewRows;
}

void tiled_few_cuda(const TiledLinearArgs& args, int device, void* stream) {
    using namespace tiled;
    const DeviceGuard guard(device);
    with_codecs("few", args.weight,
                [&](auto codecs) { few_product<decltype(codecs)>(args, device, static_cast<cudaStream_t>(stream)); });
}

}  // namespace kbitq
