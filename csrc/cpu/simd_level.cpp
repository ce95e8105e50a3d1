#include "cpu/simd_level.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#if defined(KBITQ_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kbitq {
namespace {

constexpr int kUnset = -1;
std::atomic<int> chosen{kUnset};

SimdLevel parse(const std::string& name, const char* where) {
    std::string known;
    for (SimdLevel level : available_simd_levels()) {
        if (name == simd_level_name(level)) return level;
        known += known.empty() ? "" : ", ";
        known += simd_level_name(level);
    }
    throw std::invalid_argument(std::string(where) + " = '" + name + "': this machine has " + known);
}

std::atomic<bool> tiles_allowed{true};

// Tile registers are large, so Linux hands them out on request: to a process, for all of its threads.
bool machine_has_tiles() {
#if defined(KBITQ_AMX)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool bf16 = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
    return bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

}  // namespace

const char* simd_level_name(SimdLevel level) {
    return level == SimdLevel::avx512 ? "avx512" : level == SimdLevel::avx2 ? "avx2" : "scalar";
}

std::vector<SimdLevel> available_simd_levels() {
    std::vector<SimdLevel> levels{SimdLevel::scalar};
#if defined(KBITQ_X86)
    // f16c, bmi2 and fma came with the first AVX2 chips; asked for all the same.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("fma")) {
        levels.push_back(SimdLevel::avx2);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
            levels.push_back(SimdLevel::avx512);
        }
    }
#endif
    return levels;
}

SimdLevel simd_level() {
    int level = chosen.load(std::memory_order_relaxed);
    if (level == kUnset) {
        const char* asked = std::getenv("KBITQ_SIMD");
        level = static_cast<int>(asked && *asked ? parse(asked, "KBITQ_SIMD") : available_simd_levels().back());
        chosen.store(level, std::memory_order_relaxed);
    }
    return static_cast<SimdLevel>(level);
}

void set_simd_level(const std::string& name) {
    chosen.store(static_cast<int>(parse(name, "simd")), std::memory_order_relaxed);
}

bool multiplies_bf16() {
#if defined(KBITQ_AVX512_BF16)
    return simd_level() == SimdLevel::avx512 && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

bool multiplies_tiles() {
    static const bool present = machine_has_tiles();
    return present && tiles_allowed.load(std::memory_order_relaxed) && simd_level() == SimdLevel::avx512;
}

void allow_tiles(bool allowed) { tiles_allowed.store(allowed, std::memory_order_relaxed); }

}  // namespace kbitq
