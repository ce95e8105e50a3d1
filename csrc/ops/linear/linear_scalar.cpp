// linear, one weight at a time: for machines without a vector version, and for tests.
#include "cpu/element.h"
#include "ops/codec/kernels.h"
#include "ops/linear/linear_kernels.h"

namespace kbitq {
namespace {

void linear_scalar(const LinearArgs& a, const float* x, int64_t begin, int64_t end) {
    const int64_t nblk = blocks_per_row(a.weight.cols), group = a.weight.rows / a.weight.groups;
    for (int64_t row = begin; row < end; ++row) {
        const float* levels = a.weight.codebook + ((row / group) << a.weight.k);
        const float bias = a.bias ? read_element(a.bias, a.dtype, row) : 0.0f;
        for (int64_t m = 0; m < a.batch; ++m) {
            float y = 0.0f;
            for (int64_t b = 0; b < nblk; ++b) {
                const uint32_t* words = a.weight.words + (row * nblk + b) * a.weight.k;
                const float* xs = x + (m * nblk + b) * kBlock;
                float part = 0.0f;
                for (int i = 0; i < kBlock; ++i) {
                    unsigned index = 0;
                    for (int j = 0; j < a.weight.k; ++j) index |= (words[j] >> i & 1u) << j;
                    part += levels[index] * xs[i];
                }
                y += scale_table()[a.weight.scales[row * nblk + b]] * part;
            }
            write_element(a.y, a.dtype, m * a.weight.rows + row, y + bias);
        }
    }
}

}  // namespace

const MatmulKernels kScalarMatmul = {1, linear_scalar};

}  // namespace kbitq
