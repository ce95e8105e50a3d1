// The CPU kernels of linear, one an instruction set and type of x. Apart from ops/codec/kernels.h because these may
// fuse multiply and add.
#pragma once

#include <cstdint>

#include "ops/linear/linear.h"

namespace kbitq {

// Elements of x as a kernel wants them: [batch, nblk, 32] of type x, zeros past the matrix's end, each block's elements
// such that position `lanes * v + i` holds element `vectors * i + v` (codecs/block_simd.h: Order::interleaved). One
// vector: in the order of the row.
struct LinearKernel {
    DType x;
    int vectors;
    void (*linear)(const LinearArgs&, const void* x, int64_t row_begin, int64_t row_end);  // rows of W
};

extern const LinearKernel kScalarLinear;
#if defined(KBITQ_X86)
extern const LinearKernel kAvx2Linear;
extern const LinearKernel kAvx512Linear;
#endif
#if defined(KBITQ_AVX512_BF16)
extern const LinearKernel kAvx512Bf16Linear;
#endif

const LinearKernel& linear_kernel(DType x);  // of the level in use

}  // namespace kbitq
