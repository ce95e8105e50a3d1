// The kernel for wide x, on sm_90a: trellis, a scale for four blocks.
#include "ops/linear/tiled_sm90_launch.cuh"

namespace kbitq::tiled {

template void sm90_product<WideTrellisCodecs>(const TiledLinearArgs&, int, cudaStream_t);

}  // namespace kbitq::tiled
