#include "cpu/simd_avx512.h"

#define KBITQ_ISA avx512
#include "ops/formats/gguf_linear_simd.h"

namespace kbitq {

const GgufLinear kAvx512GgufLinear = avx512::linear;

}  // namespace kbitq
