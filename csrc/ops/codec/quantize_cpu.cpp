#include <cmath>

#include "cpu/float_env.h"
#include "cpu/parallel.h"
#include "format/scale_e4m4.h"
#include "ops/codec/kernels.h"

namespace kbitq {
namespace {

constexpr int64_t kGrainBlocks = 256;  // 8,192 weights: some ten microseconds

void fill_tables(QuantizeTables& t, const QuantizeArgs& a) {
    const int n = 1 << a.packed.k;
    for (int i = 0; i < kMaxLevels + kTablePadding; ++i) {
        t.levels[i] = i < n ? a.levels[i] : 0.0f;
        t.mid[i] = i + 1 < n ? level_midpoint(a.levels[i], a.levels[i + 1]) : INFINITY;
    }
    for (int depth = 0; depth < a.packed.k; ++depth) {
        for (int prefix = 0; prefix < kMaxLevels / 2 + kTablePadding; ++prefix) {
            const int step = 1 << (a.packed.k - depth);
            t.tree[depth][prefix] = prefix < (1 << depth) ? t.mid[prefix * step + step / 2 - 1] : 0.0f;
        }
    }
    const int x = a.amax ? tensor_exponent(*a.amax) : 0;
    t.to_blocks = exp2_int(-x);
    t.top = a.amax ? static_cast<int>(top_byte(x, a.dtype)) : kScaleBytes - 1;
    t.zero = zero_index(t.mid, n);
    if (a.packed.codebook) {
        const float from_blocks = exp2_int(x);
        for (int i = 0; i < n; ++i) a.packed.codebook[i] = a.levels[i] * from_blocks;
    }
}

}  // namespace

void quantize_cpu(const QuantizeArgs& a, int threads) {
    QuantizeTables tables;
    {
        StrictFloat strict;
        fill_tables(tables, a);
    }
    const Kernels& k = kernels();
    parallel_for(a.packed.rows * blocks_per_row(a.packed.cols), kGrainBlocks, threads,
                 [&](int64_t begin, int64_t end) { k.quantize(a, tables, begin, end); });
}

}  // namespace kbitq
