#include "cpu/simd_avx2.h"

#define KBITQ_ISA avx2
#include "ops/formats/gguf_decode_simd.h"

namespace kbitq {

const GgufDecode kAvx2GgufDecode = avx2::decode;

}  // namespace kbitq
