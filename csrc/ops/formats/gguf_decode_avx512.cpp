#include "cpu/simd_avx512.h"

#define KBITQ_ISA avx512
#include "ops/formats/gguf_decode_simd.h"

namespace kbitq {

const GgufKernels kAvx512Gguf = {reader_of, avx512::decode};

}  // namespace kbitq
