// What both vector kernels of GGUF blocks need beside cpu/simd_*.h.
#pragma once

#include "ops/formats/gguf_kernels.h"

namespace kbitq::KBITQ_ISA {
namespace {

// kLanes codes as floats.
inline F load_codes(const int8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
