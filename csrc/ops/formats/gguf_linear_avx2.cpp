#include "cpu/simd_avx2.h"

#define KBITQ_ISA avx2
#include "ops/formats/gguf_linear_simd.h"

namespace kbitq {

const GgufLinear kAvx2GgufLinear = avx2::linear;

}  // namespace kbitq
