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

}  // namespace kbitq
