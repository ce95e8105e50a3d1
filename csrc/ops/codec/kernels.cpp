#include "ops/codec/kernels.h"

#include "cpu/simd_level.h"

namespace kbitq {

const Kernels& kernels() {
    switch (simd_level()) {
#if defined(KBITQ_X86)
        case SimdLevel::avx512: return kAvx512Kernels;
        case SimdLevel::avx2: return kAvx2Kernels;
#endif
        default: return kScalarKernels;
    }
}

}  // namespace kbitq
