// The CPU kernels of one instruction set: a table that the *_cpu.cpp ops call through. Each kernel does a range of the
// work, so that a caller can share it out among threads; equal bytes whatever the ranges and the set.
#pragma once

#include <cstdint>

#include "codecs/encoding.h"
#include "ops/codec/dequantize.h"
#include "ops/codec/quantize.h"
#include "ops/codec/scan.h"
#include "ops/codec/stats.h"

namespace kbitq {

struct ScanRange {
    float amax;
    int64_t nonfinite;
    int64_t first;  // flat index, -1 if none
};

struct Kernels {
    void (*scan)(const ScanArgs&, int64_t begin, int64_t end, ScanRange& out);               // elements
    void (*quantize)(const QuantizeArgs&, const EncodeTables&, int64_t begin, int64_t end);  // scales
    void (*dequantize)(const DequantizeArgs&, int64_t begin, int64_t end);                   // blocks
    void (*stats)(const StatsArgs&, int64_t begin, int64_t end);                             // rows
};

extern const Kernels kScalarKernels;
#if defined(KBITQ_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

const Kernels& kernels();  // of the level in use

}  // namespace kbitq
