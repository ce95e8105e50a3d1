// format.md section 3 forbids flush-to-zero. A thread may have it on all the same (torch.set_flush_denormal, a library
// built with -ffast-math), so every thread that computes holds one of these while it does.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace kbitq {

class StrictFloat {
  public:
    StrictFloat(const StrictFloat&) = delete;
    StrictFloat& operator=(const StrictFloat&) = delete;
#if defined(__x86_64__)
    StrictFloat() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
    ~StrictFloat() { _mm_setcsr(saved_); }

  private:
    static constexpr unsigned kDefault = 0x1F80;  // all exceptions masked, round to nearest, subnormals kept
    unsigned saved_;
#elif defined(__aarch64__)
    StrictFloat() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
    }
    ~StrictFloat() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

  private:
    std::uint64_t saved_;
#else
    StrictFloat() {}
#endif
};

}  // namespace kbitq
