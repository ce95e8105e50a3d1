// The CPU matmul kernels, one table an instruction set. Apart from cpu/kernels.h because these may fuse multiply and
// add.
#pragma once

#include <cstdint>

#include "ops/linear/linear.h"

namespace kbitq {

struct MatmulKernels {
    // Elements of x as the kernel wants them: float32 [batch, nblk, 32], zeros past `in`, each block's elements such
    // that position `lanes * v + i` holds element `vectors * i + v` (cpu/simd_*.h: unpack_interleaved).
    int vectors;
    void (*linear)(const LinearArgs&, const float* x, int64_t row_begin, int64_t row_end);  // rows of W
};

extern const MatmulKernels kScalarMatmul;
#if defined(KBITQ_X86)
extern const MatmulKernels kAvx2Matmul;
extern const MatmulKernels kAvx512Matmul;
#endif

const MatmulKernels& matmul_kernels();  // of the level in use

// The same for bfloat16 as it is: x [batch, nblk, 32] in order, zeros past `in`.
using Bf16Linear = void (*)(const LinearArgs&, const uint16_t* x, int64_t row_begin, int64_t row_end);

#if defined(KBITQ_AVX512_BF16)
extern const Bf16Linear kAvx512Bf16Linear;
#endif

Bf16Linear bf16_linear();  // of the level in use; null where float32 is the way

}  // namespace kbitq
