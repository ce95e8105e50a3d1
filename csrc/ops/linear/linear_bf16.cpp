// linear compiled for AVX512_BF16.
#include "cpu/simd_avx512.h"

#define KBITQ_ISA avx512
#include "ops/linear/linear_bf16.h"

namespace kbitq {

const LinearKernel kAvx512Bf16Linear = {DType::bf16, 1, avx512::linear<avx512::Bf16Product>};

}  // namespace kbitq
