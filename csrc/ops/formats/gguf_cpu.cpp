#include <algorithm>
#include <vector>

#include "cpu/element.h"
#include "cpu/parallel.h"
#include "cpu/simd_level.h"
#include "formats/gguf_blocks.h"
#include "ops/formats/gguf_kernels.h"

namespace kbitq {
namespace {

constexpr int64_t kGrainValues = 32'768;  // some ten microseconds

const GgufKernels& gguf_kernels() { return KBITQ_AT_SIMD_LEVEL(Gguf); }

GgufLinear linear_kernel() { return KBITQ_AT_SIMD_LEVEL(GgufLinear); }

void widen_rows(const GgufLinearArgs& a, float* x, float* sums) {
    const int64_t count = a.experts * a.batch * a.cols;
    for (int64_t first = 0; first < count; first += kGroup) {
        float sum = 0.0f;
        for (int64_t i = first; i < first + kGroup; ++i) sum += x[i] = read_element(a.x, a.dtype, i);
        sums[first / kGroup] = sum;
    }
}

}  // namespace

GgufSizes gguf_sizes(int type) {
    GgufSizes sizes{0, 0};
    with_gguf_block(type, [&](auto block) { sizes = {block.kValues, block.kBytes}; });
    return sizes;
}

void decode_gguf_cpu(const GgufDecodeArgs& a, int threads) {
    const GgufKernels& kernels = gguf_kernels();
    const GgufReader read = kernels.reader(a.type);
    const GgufSizes sizes = gguf_sizes(a.type);
    const int64_t most = gguf_run_blocks(sizes);
    parallel_for(a.count, kGrainValues / sizes.values, threads, [&](int64_t begin, int64_t end) {
        GgufRun run;
        for (int64_t block = begin; block < end; block += most) {
            const int count = static_cast<int>(std::min(most, end - block));
            read(a.blocks + block * sizes.bytes, count, run);
            kernels.decode(a, run, count * sizes.values / kGroup, block * sizes.values);
        }
    });
}

void linear_gguf_cpu(const GgufLinearArgs& a, int threads) {
    // Kept: a decode step calls this with the same sizes again and again.
    static thread_local std::vector<float> x, sums;
    const auto count = static_cast<size_t>(a.experts * a.batch * a.cols);
    x.resize(std::max(x.size(), count));
    sums.resize(std::max(sums.size(), count / kGroup));
    widen_rows(a, x.data(), sums.data());
    const GgufRows rows{x.data(), sums.data()};
    const GgufLinear linear = linear_kernel();
    const GgufReader read = gguf_kernels().reader(a.type);
    parallel_for_in_turn(a.experts * a.rows, kGrainValues / (a.cols + 1) + 1, threads,
                         [&](int64_t begin, int64_t end) { linear(a, read, rows, begin, end); });
}

}  // namespace kbitq
