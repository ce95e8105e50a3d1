// The matmul compiled for AVX512 with fused multiply-add.
#include "cpu/simd_avx512.h"

#define KBITQ_ISA avx512
#include "ops/linear/linear_simd.h"

namespace kbitq {

const MatmulKernels kAvx512Matmul = {avx512::kVectors, avx512::linear};

}  // namespace kbitq
