// The kernel for few rows of x: trellis, a scale for four blocks.
#include "ops/linear/tiled_few_launch.cuh"

namespace kbitq::tiled {

template void few_product<WideTrellisCodecs>(const TiledLinearArgs&, int, cudaStream_t);

}  // namespace kbitq::tiled
