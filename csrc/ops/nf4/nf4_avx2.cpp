// NF4 compiled for AVX2; linear with fused multiply-add.
#include "cpu/simd_avx2.h"

#define KBITQ_ISA avx2
#include "ops/nf4/nf4_simd.h"

namespace kbitq {

const Nf4Kernels kAvx2Nf4 = {avx2::quantize,
                             avx2::dequantize,
                             {DType::f32, avx2::FloatProduct::kPairs, 1, avx2::linear<avx2::FloatProduct>, nullptr}};

}  // namespace kbitq
