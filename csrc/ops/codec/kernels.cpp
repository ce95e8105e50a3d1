#include "ops/codec/kernels.h"

#include "cpu/float_env.h"
#include "cpu/simd_level.h"
#include "format/scale_e4m4.h"

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

const float* scale_table() {
    struct Table {
        float value[kScaleBytes];
        Table() {
            StrictFloat strict;
            for (int b = 0; b < kScaleBytes; ++b) value[b] = decode_e4m4(static_cast<uint32_t>(b));
        }
    };
    static const Table table;
    return table.value;
}

}  // namespace kbitq
