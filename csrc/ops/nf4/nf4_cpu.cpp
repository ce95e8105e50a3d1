// NF4 on the CPU: which kernel, on how many threads.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/element.h"
#include "cpu/parallel.h"
#include "cpu/simd_level.h"
#include "ops/nf4/nf4_kernels.h"

namespace kbitq {
namespace {

constexpr int64_t kGrain = 1 << 16;  // weights: some ten microseconds

const Nf4Kernels& nf4_kernels() { return KBITQ_AT_SIMD_LEVEL(Nf4); }

constexpr int kTileBatch = 3;  // rows of x from which tiles of sixteen are quicker than vectors of one

const Nf4Linear& nf4_linear(DType x, int64_t batch) {
    (void)x, (void)batch;
#if defined(KBITQ_AMX)
    if (x == DType::bf16 && batch >= kTileBatch && multiplies_tiles()) return kAmxNf4Linear;
#endif
#if defined(KBITQ_AVX512_BF16)
    if (x == DType::bf16 && multiplies_bf16()) return kAvx512Bf16Nf4Linear;
#endif
    return nf4_kernels().linear;
}

struct alignas(64) Line {
    std::byte bytes[64];
};

// x in the type and order that the kernel reads.
template <DType From, DType To>
void arrange_as(const Nf4LinearArgs& a, int pairs, Stored<To>* out) {
    const auto* x = static_cast<const Stored<From>*>(a.x);
    for (int64_t i = 0; i < a.batch * a.cols; i += 2 * pairs) {
        for (int j = 0; j < 2 * pairs; ++j) out[i + j] = round_to<To>(widen<From>(x[i + 2 * (j % pairs) + j / pairs]));
    }
}

}  // namespace

void nf4_quantize_cpu(const Nf4QuantizeArgs& a, int threads) {
    const Nf4Kernels& kernels = nf4_kernels();
    parallel_for(a.count / a.block, kGrain / a.block, threads,
                 [&](int64_t begin, int64_t end) { kernels.quantize(a, begin, end); });
    nf4_quantize_tail(a);
}

void nf4_dequantize_cpu(const Nf4DequantizeArgs& a, int threads) {
    const Nf4Kernels& kernels = nf4_kernels();
    parallel_for(a.count / a.block, kGrain / a.block, threads,
                 [&](int64_t begin, int64_t end) { kernels.dequantize(a, begin, end); });
    nf4_dequantize_tail(a);
}

void nf4_linear_cpu(const Nf4LinearArgs& a, int threads) {
    static thread_local std::vector<Line> buffer;  // kept: a decode step comes again with the same sizes
    const Nf4Linear& kernel = nf4_linear(a.dtype, a.batch);
    const int64_t bytes = a.batch * a.cols * dtype_size(kernel.x);
    buffer.resize(static_cast<size_t>(bytes) / sizeof(Line) + 1);
    if (kernel.arrange) {
        kernel.arrange(a, buffer.data());
    } else {
        with_element(a.dtype, [&](auto from) {
            with_element(kernel.x, [&](auto to) {
                arrange_as<from, to>(a, kernel.pairs, reinterpret_cast<Stored<to>*>(buffer.data()));
            });
        });
    }
    const void* x = buffer.data();
    const int64_t rows = kernel.rows;
    parallel_for_in_turn(
        (a.rows + rows - 1) / rows, 2 * kGrain / (rows * a.cols + 1) + 1, threads,
        [&](int64_t begin, int64_t end) { kernel.run(a, x, begin * rows, std::min(end * rows, a.rows)); });
}

}  // namespace kbitq
