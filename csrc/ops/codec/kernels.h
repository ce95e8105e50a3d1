// The CPU kernels of one instruction set: a table that the *_cpu.cpp ops call through. Each kernel does a range of the
// work, so that a caller can share it out among threads; equal bytes whatever the ranges and the set.
#pragma once

#include <cstdint>

#include "format/codebook.h"
#include "ops/codec/dequantize.h"
#include "ops/codec/quantize.h"
#include "ops/codec/scan.h"
#include "ops/codec/stats.h"

namespace kbitq {

constexpr int kTablePadding = 16;  // lanes of the widest vector: small tables are loaded whole

// The numbers every block of one quantize call shares.
struct QuantizeTables {
    alignas(64) float levels[kMaxLevels + kTablePadding];
    alignas(64) float mid[kMaxLevels + kTablePadding];  // 2^K - 1 thresholds, then +inf
    // mid again in the order of the binary search, for tables of a vector's width: tree[d] holds the 2^d thresholds
    // that the compare at depth d may need, one for each index prefix of d bits.
    alignas(64) float tree[kMaxBits][kMaxLevels / 2 + kTablePadding];
    float to_blocks;  // 2^-x
    int top;          // largest byte that may be chosen
    int zero;         // index of an exact zero
};

struct ScanRange {
    float amax;
    int64_t nonfinite;
    int64_t first;  // flat index, -1 if none
};

struct Kernels {
    void (*scan)(const ScanArgs&, int64_t begin, int64_t end, ScanRange& out);                 // elements
    void (*quantize)(const QuantizeArgs&, const QuantizeTables&, int64_t begin, int64_t end);  // blocks
    void (*dequantize)(const DequantizeArgs&, int64_t begin, int64_t end);                     // blocks
    void (*stats)(const StatsArgs&, int64_t begin, int64_t end);                               // rows
};

extern const Kernels kScalarKernels;
#if defined(KBITQ_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

const Kernels& kernels();  // of the level in use

// The values of the 256 scale bytes, so that decoding one costs a load.
const float* scale_table();

}  // namespace kbitq
