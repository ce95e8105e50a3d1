#include "cpu/parallel.h"
#include "format/block.h"
#include "ops/codec/dequantize.h"
#include "ops/codec/kernels.h"

namespace kbitq {

constexpr int64_t kGrainBlocks = 1024;  // 32,768 weights: some ten microseconds

void dequantize_cpu(const DequantizeArgs& a, int threads) {
    const Kernels& k = kernels();
    parallel_for(a.packed.rows * blocks_per_row(a.packed.cols), kGrainBlocks, threads,
                 [&](int64_t begin, int64_t end) { k.dequantize(a, begin, end); });
}

}  // namespace kbitq
