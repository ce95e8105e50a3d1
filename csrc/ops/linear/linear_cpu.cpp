#include "ops/linear/linear.h"

#include <algorithm>
#include <vector>

#include "cpu/element.h"
#include "cpu/parallel.h"
#include "cpu/simd_level.h"
#include "ops/linear/linear_kernels.h"

namespace kbitq {
namespace {

constexpr int64_t kGrainBlocks = 4096;  // 131,072 weights: some twenty microseconds

// x as float32 in the order of the kernel's lanes, once a call: every row of W reads it.
void arrange(const LinearArgs& a, int vectors, float* out) {
    const int64_t nblk = blocks_per_row(a.weight.cols);
    const int lanes = kBlock / vectors;
    for (int64_t m = 0; m < a.batch; ++m) {
        for (int64_t b = 0; b < nblk; ++b, out += kBlock) {
            for (int i = 0; i < kBlock; ++i) {
                const int64_t column = b * kBlock + i;
                out[lanes * (i % vectors) + i / vectors] =
                    column < a.weight.cols ? read_element(a.x, a.dtype, m * a.weight.cols + column) : 0.0f;
            }
        }
    }
}

// x as it is, each row with zeros up to whole blocks.
const uint16_t* pad(const LinearArgs& a, std::vector<uint16_t>& out) {
    const int64_t width = blocks_per_row(a.weight.cols) * kBlock;
    out.assign(static_cast<size_t>(a.batch * width), 0);
    for (int64_t m = 0; m < a.batch; ++m) {
        const uint16_t* from = static_cast<const uint16_t*>(a.x) + m * a.weight.cols;
        std::copy(from, from + a.weight.cols, out.begin() + m * width);
    }
    return out.data();
}

}  // namespace

const MatmulKernels& matmul_kernels() {
    switch (simd_level()) {
#if defined(KBITQ_X86)
        case SimdLevel::avx512: return kAvx512Matmul;
        case SimdLevel::avx2: return kAvx2Matmul;
#endif
        default: return kScalarMatmul;
    }
}

Bf16Linear bf16_linear() {
#if defined(KBITQ_AVX512_BF16)
    if (multiplies_bf16()) return kAvx512Bf16Linear;
#endif
    return nullptr;
}

void linear_cpu(const LinearArgs& a, int threads) {
    const MatmulKernels& kernels = matmul_kernels();
    const int64_t nblk = blocks_per_row(a.weight.cols);
    if (const Bf16Linear linear = a.dtype == DType::bf16 ? bf16_linear() : nullptr) {
        static thread_local std::vector<uint16_t> padded;
        const uint16_t* rows = static_cast<const uint16_t*>(a.x);
        if (a.weight.cols % kBlock) rows = pad(a, padded);
        parallel_for_in_turn(a.weight.rows, kGrainBlocks / (nblk + 1) + 1, threads,
                             [&](int64_t begin, int64_t end) { linear(a, rows, begin, end); });
        return;
    }
    static thread_local std::vector<float>
        arranged;  // kept: a decode step calls this with the same sizes again and again
    arranged.resize(static_cast<size_t>(a.batch * nblk * kBlock));
    arrange(a, kernels.vectors, arranged.data());
    const float* x = arranged.data();
    parallel_for_in_turn(a.weight.rows, kGrainBlocks / (nblk + 1) + 1, threads,
                         [&](int64_t begin, int64_t end) { kernels.linear(a, x, begin, end); });
}

}  // namespace kbitq
