#include "codecs/dispatch.h"
#include "cpu/float_env.h"
#include "cpu/parallel.h"
#include "format/scale_e4m4.h"
#include "ops/codec/kernels.h"

namespace kbitq {
namespace {

constexpr int64_t kGrainScales = 256;  // of planes 8,192 weights: some ten microseconds
constexpr int64_t kGrainWalks = 32;    // of a codec that searches for walks

// Writes the stored codebook, levels * 2^x.
void write_codebook(const QuantizeArgs& a, int x) {
    const float from_blocks = exp2_int(x);
    for (int64_t i = 0; i < level_count(a.packed); ++i) a.packed.codebook[i] = a.levels[i] * from_blocks;
}

}  // namespace

void quantize_cpu(const QuantizeArgs& a, int threads) {
    const StrictFloat strict;
    const int x = a.amax ? tensor_exponent(*a.amax) : 0;
    const EncodeTables common{exp2_int(-x), a.amax ? static_cast<int>(top_byte(x, a.dtype)) : kScaleBytes - 1};
    if (a.packed.codebook) write_codebook(a, x);
    const Kernels& k = kernels();
    with_encode_tables(a.packed, a.levels, common, [&](const EncodeTables& tables) {
        const int64_t grain = a.packed.codec == Codec::planes ? kGrainScales : kGrainWalks;
        parallel_for(a.packed.rows * scales_per_row(a.packed), grain, threads,
                     [&](int64_t begin, int64_t end) { k.quantize(a, tables, begin, end); });
    });
}

}  // namespace kbitq
