#include "ops/codec/kernels.h"

#include "cpu/simd_level.h"

namespace kbitq {

const Kernels& kernels() { return KBITQ_AT_SIMD_LEVEL(Kernels); }

}  // namespace kbitq
