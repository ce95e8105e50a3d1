// The CPU matmul kernels, one table an instruction set. Apart from cpu/kernels.h because these may fuse multiply and
// add.
#pragma once

#include <cstdint>

#include "ops/linear.h"

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

}  // namespace kbitq
