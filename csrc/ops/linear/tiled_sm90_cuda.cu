// The kernel for wide x on sm_90a: when it is used, and the way to the list of codecs. Planes are compiled here.
#include "ops/linear/tiled.h"

#include <algorithm>

#include "ops/linear/tiled_sm90_launch.cuh"

namespace kbitq {
namespace tiled {

extern template void sm90_product<TrellisCodecs>(const TiledLinearArgs&, int, cudaStream_t);
extern template void sm90_product<WideTrellisCodecs>(const TiledLinearArgs&, int, cudaStream_t);

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
    tiled::with_codecs("sm90", args.weight, [&](auto codecs) {
        tiled::sm90_product<decltype(codecs)>(args, device, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace kbitq
