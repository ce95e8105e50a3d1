#include "cpu/simd_avx2.h"

#define KBITQ_ISA avx2
#include "ops/formats/gguf_decode_simd.h"

namespace kbitq {

const GgufKernels kAvx2Gguf = {reader_of, avx2::decode};

}  // namespace kbitq
