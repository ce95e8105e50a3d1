// Which instruction set the CPU kernels use: the best the machine has, or what KBITQ_SIMD / set_simd_level asks for.
#pragma once

#include <string>
#include <vector>

namespace kbitq {

enum class SimdLevel { scalar, avx2, avx512 };

const char* simd_level_name(SimdLevel level);
std::vector<SimdLevel> available_simd_levels();  // ascending; always begins with scalar
SimdLevel simd_level();                          // throws std::invalid_argument if KBITQ_SIMD cannot be had
void set_simd_level(const std::string& name);    // likewise
bool multiplies_bf16();                          // AVX512_BF16, with the level avx512
bool multiplies_tiles();                         // AMX in bfloat16, likewise, and allowed
void allow_tiles(bool allowed);                  // for tests: without, what there is for other machines is used

// Of kernels that are compiled for each instruction set, those for the level in use: KBITQ_AT_SIMD_LEVEL(Codes) is
// kScalarCodes, kAvx2Codes or kAvx512Codes.
#if defined(KBITQ_X86)
#define KBITQ_AT_SIMD_LEVEL(kernels) ::kbitq::at_simd_level(kScalar##kernels, kAvx2##kernels, kAvx512##kernels)
#else
#define KBITQ_AT_SIMD_LEVEL(kernels) kScalar##kernels
#endif
template <typename Kernels>
const Kernels& at_simd_level(const Kernels& scalar, const Kernels& avx2, const Kernels& avx512) {
    switch (simd_level()) {
        case SimdLevel::avx512: return avx512;
        case SimdLevel::avx2: return avx2;
        default: return scalar;
    }
}

}  // namespace kbitq
