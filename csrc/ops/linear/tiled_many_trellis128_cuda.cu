// The kernel for many rows of x, and for experts: trellis, a scale for four blocks.
#include "ops/linear/tiled_many_launch.cuh"

namespace kbitq::tiled {

template void many_product<WideTrellisCodecs>(const TiledLinearArgs&, const ExpertArgs&, int64_t, int, cudaStream_t);

}  // namespace kbitq::tiled
