// linear, one weight at a time: for machines without a vector version, and for tests.
#include "codecs/block_scale.h"
#include "codecs/dispatch_scalar.h"
#include "cpu/element.h"
#include "cpu/scale_table.h"
#include "ops/linear/linear_kernels.h"

namespace kbitq {
namespace {

constexpr int64_t kRowsOfX = 8;  // that a block of W is decoded for at once

// y[m], without the bias, of one row of W and `count` rows of x.
template <typename C>
void multiply_row(const C& codec, const PackedMatrix& w, int64_t row, const float* codebook, const float* x,
                  int64_t count, float (&y)[kRowsOfX]) {
    const int64_t nblk = blocks_per_row(w.cols);
    for (float& sum : y) sum = 0.0f;
    for (int64_t b = 0; b < nblk; ++b) {
        const int64_t block = row * nblk + b;
        float level[kBlock];
        codec.decode_block(level, w.words + block * codec.words(), codebook);
        for (int64_t m = 0; m < count; ++m) {
            const float* xs = x + (m * nblk + b) * kBlock;
            float part = 0.0f;
            for (int i = 0; i < kBlock; ++i) part += level[i] * xs[i];
            y[m] += scale_value(w, scale_table(), scale_index(w, block, {row, b * kBlock, kBlock})) * part;
        }
    }
}

void linear_scalar(const LinearArgs& a, const void* x, int64_t begin, int64_t end) {
    const int64_t rows = a.weight.rows, group = rows / a.weight.groups;
    const int64_t stride = blocks_per_row(a.weight.cols) * kBlock;  // of arranged x
    with_codec(a.weight, [&](auto codec) {
        for (int64_t row = begin; row < end; ++row) {
            const float* codebook = a.weight.codebook + row / group * level_count(a.weight);
            const float bias = a.bias ? read_element(a.bias, a.dtype, row) : 0.0f;
            for (int64_t m = 0; m < a.batch; m += kRowsOfX) {
                const int64_t count = a.batch - m < kRowsOfX ? a.batch - m : kRowsOfX;
                float y[kRowsOfX];
                multiply_row(codec, a.weight, row, codebook, static_cast<const float*>(x) + m * stride, count, y);
                for (int64_t i = 0; i < count; ++i) write_element(a.y, a.dtype, (m + i) * rows + row, y[i] + bias);
            }
        }
    });
}

}  // namespace

const LinearKernel kScalarLinear = {DType::f32, 1, linear_scalar};

}  // namespace kbitq
