// The CPU kernels of gguf.h of one instruction set. Decoding rounds every operation on its own; the product may fuse,
// and is compiled apart.
#pragma once

#include "ops/formats/gguf.h"

namespace kbitq {

// Blocks [begin, end).
using GgufDecode = void (*)(const GgufDecodeArgs&, int64_t begin, int64_t end);

// x as float32 [experts * batch, cols], and the sum of each group of sixteen of it [experts * batch, cols / 16].
struct GgufRows {
    const float* x;
    const float* sums;
};
// Rows [begin, end) of all experts' rows.
using GgufLinear = void (*)(const GgufLinearArgs&, const GgufRows&, int64_t begin, int64_t end);

extern const GgufDecode kScalarGgufDecode;
extern const GgufLinear kScalarGgufLinear;
#if defined(KBITQ_X86)
extern const GgufDecode kAvx2GgufDecode, kAvx512GgufDecode;
extern const GgufLinear kAvx2GgufLinear, kAvx512GgufLinear;
#endif

}  // namespace kbitq
