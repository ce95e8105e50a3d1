// The vector kernels compiled for AVX2. Nothing outside its namespace may be instantiated here (cmake/simd.cmake).
#include "cpu/simd_avx2.h"

#define KBITQ_ISA avx2
#include "ops/codec/dequantize_simd.h"
#include "ops/codec/quantize_simd.h"
#include "ops/codec/scan_simd.h"
#include "ops/codec/stats_simd.h"

namespace kbitq {

const Kernels kAvx2Kernels = {avx2::scan, avx2::quantize, avx2::dequantize, avx2::stats};

}  // namespace kbitq
