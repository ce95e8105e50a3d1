#include "cpu/simd_avx512.h"

#define KBITQ_ISA avx512
#include "ops/formats/gguf_decode_simd.h"

namespace kbitq {

const GgufDecode kAvx512GgufDecode = avx512::decode;

}  // namespace kbitq
