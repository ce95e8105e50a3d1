// linear compiled for AVX512 with fused multiply-add.
#include "cpu/simd_avx512.h"

#define KBITQ_ISA avx512
#include "ops/linear/linear_simd.h"

namespace kbitq {

const LinearKernel kAvx512Linear = {DType::f32, avx512::kVectors, avx512::linear<avx512::FloatProduct>};

}  // namespace kbitq
