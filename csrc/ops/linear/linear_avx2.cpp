// linear compiled for AVX2 with fused multiply-add.
#include "cpu/simd_avx2.h"

#define KBITQ_ISA avx2
#include "ops/linear/linear_simd.h"

namespace kbitq {

const LinearKernel kAvx2Linear = {DType::f32, avx2::kVectors, avx2::linear<avx2::FloatProduct>};

}  // namespace kbitq
