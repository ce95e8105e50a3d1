// The linear layer's choice of a kernel; the kernel for many rows of x, for the list of codecs. Planes are compiled
// here.
#include "ops/linear/tiled.h"

#include <algorithm>

#include "ops/linear/tiled_many_launch.cuh"

namespace kbitq {
namespace tiled {

extern template void many_product<TrellisCodecs>(const TiledLinearArgs&, const ExpertArgs&, int64_t, int, cudaStream_t);
extern template void many_product<WideTrellisCodecs>(const TiledLinearArgs&, const ExpertArgs&, int64_t, int,
                                                     cudaStream_t);

namespace {

void launch_any(const TiledLinearArgs& args, const ExpertArgs& experts, int64_t m, int device, void* stream) {
    const DeviceGuard guard(device);
    with_codecs("many", args.weight, [&](auto codecs) {
        many_product<decltype(codecs)>(args, experts, m, device, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace
}  // namespace tiled

int64_t tiled_workspace_bytes(int device) {
    return multiprocessors(device) * kWorkspaceSums * static_cast<int64_t>(sizeof(float));
}

void tiled_linear_cuda(const TiledLinearArgs& args, int device, void* stream) {
    const int64_t most = args.staging ? kSm90Rows : kManyRows;
    for (int64_t m0 = 0; m0 < args.m; m0 += most) {
        TiledLinearArgs slice = args;
        slice.m = std::min(most, args.m - m0);
        slice.x = static_cast<const uint16_t*>(args.x) + m0 * args.weight.cols;
        slice.y = static_cast<uint16_t*>(args.y) + m0 * args.weight.rows;
        if (slice.m <= kFewRows) {
            tiled_few_cuda(slice, device, stream);
        } else if (args.staging && tiled_staging_bytes(slice.m, args.weight.rows, args.weight.cols, device) > 0) {
            tiled_sm90_cuda(slice, device, stream);
        } else {
            tiled_many_cuda(slice, device, stream);
        }
    }
}

void tiled_many_cuda(const TiledLinearArgs& args, int device, void* stream) {
    tiled::launch_any(args, {nullptr, 1}, args.m, device, stream);
}

void tiled_experts_cuda(const TiledLinearArgs& args, const ExpertArgs& experts, int device, void* stream) {
    tiled::launch_any(args, experts, (args.m + experts.experts - 1) / experts.experts, device, stream);
}

}  // namespace kbitq
