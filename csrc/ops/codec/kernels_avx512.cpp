// The vector kernels compiled for AVX512. Nothing outside its namespace may be instantiated here (cmake/simd.cmake).
#include "cpu/simd_avx512.h"

#define KBITQ_ISA avx512
#include "ops/codec/dequantize_simd.h"
#include "ops/codec/quantize_simd.h"
#include "ops/codec/scan_simd.h"
#include "ops/codec/stats_simd.h"

namespace kbitq {

const Kernels kAvx512Kernels = {avx512::scan, avx512::quantize, avx512::dequantize, avx512::stats};

}  // namespace kbitq
