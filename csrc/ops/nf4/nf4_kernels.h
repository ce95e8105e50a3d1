// The CPU kernels of NF4, one set an instruction set. Quantizing and dequantizing give equal bytes in all of them;
// linear may fuse multiply and add.
#pragma once

#include <cstdint>

#include "ops/nf4/nf4.h"

namespace kbitq {

// x: its type, and its order: of every 2 * pairs neighbours first those at even places, then those at odd ones, as the
// halves of bytes lie; or what `arrange` writes of x, as many elements. A call of `run` begins at a multiple of `rows`.
struct Nf4Linear {
    DType x;
    int pairs;
    int rows;
    void (*run)(const Nf4LinearArgs&, const void* x, int64_t begin, int64_t end);  // rows of W
    void (*arrange)(const Nf4LinearArgs&, void* out);
};

struct Nf4Kernels {
    void (*quantize)(const Nf4QuantizeArgs&, int64_t begin, int64_t end);      // blocks that are whole
    void (*dequantize)(const Nf4DequantizeArgs&, int64_t begin, int64_t end);  // blocks that are whole
    Nf4Linear linear;
};

extern const Nf4Kernels kScalarNf4;
#if defined(KBITQ_X86)
extern const Nf4Kernels kAvx2Nf4;
extern const Nf4Kernels kAvx512Nf4;
#endif
#if defined(KBITQ_AVX512_BF16)
extern const Nf4Linear kAvx512Bf16Nf4Linear;
#endif
#if defined(KBITQ_AMX)
extern const Nf4Linear kAmxNf4Linear;
#endif

// The block that the tensor's end cuts short.
void nf4_quantize_tail(const Nf4QuantizeArgs& args);
void nf4_dequantize_tail(const Nf4DequantizeArgs& args);

}  // namespace kbitq
