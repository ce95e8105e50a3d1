// NF4 compiled for AVX512; linear with fused multiply-add.
#include "cpu/simd_avx512.h"

#define KBITQ_ISA avx512
#include "ops/nf4/nf4_simd.h"

namespace kbitq {

const Nf4Kernels kAvx512Nf4 = {
    avx512::quantize,
    avx512::dequantize,
    {DType::f32, avx512::FloatProduct::kPairs, 1, avx512::linear<avx512::FloatProduct>, nullptr}};

}  // namespace kbitq
