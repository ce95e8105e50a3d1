// The CPU kernels of gguf.h of one instruction set. What a block type looks like is compiled once, in its reader;
// everything else works on what readers leave. Decoding rounds every operation on its own; the product may fuse, and is
// compiled apart.
#pragma once

#include "formats/gguf_bytes.h"
#include "ops/formats/gguf.h"

namespace kbitq {

constexpr int kGgufRunGroups = 32;  // of sixteen values each: two of the largest blocks

// Blocks as codes: value i of group g is scale[g] * q[16 * g + i] - min[g].
struct GgufRun {
    alignas(64) int8_t q[kGroup * kGgufRunGroups];
    alignas(64) float scale[kGgufRunGroups];
    bool has_min;
    alignas(64) float min[kGgufRunGroups];  // of anything, without has_min
};

// Reads `count` neighbouring blocks, at most kGgufRunGroups groups.
using GgufReader = void (*)(const uint8_t* blocks, int count, GgufRun& out);

// `count` groups as values, from element `first` of a.out on.
using GgufDecode = void (*)(const GgufDecodeArgs& a, const GgufRun& run, int count, int64_t first);

struct GgufKernels {
    GgufReader (*reader)(int type);
    GgufDecode decode;
};

// x as float32 [experts * batch, cols], and the sum of each group of sixteen of it [experts * batch, cols / 16].
struct GgufRows {
    const float* x;
    const float* sums;
};
// Rows [begin, end) of all experts' rows.
using GgufLinear = void (*)(const GgufLinearArgs&, GgufReader, const GgufRows&, int64_t begin, int64_t end);

extern const GgufKernels kScalarGguf;
extern const GgufLinear kScalarGgufLinear;
#if defined(KBITQ_X86)
extern const GgufKernels kAvx2Gguf, kAvx512Gguf;
extern const GgufLinear kAvx2GgufLinear, kAvx512GgufLinear;
#endif

// Blocks that a run holds.
inline int gguf_run_blocks(const GgufSizes& sizes) { return kGroup * kGgufRunGroups / sizes.values; }

}  // namespace kbitq
