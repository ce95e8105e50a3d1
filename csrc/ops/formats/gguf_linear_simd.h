// y = x W^T from GGUF blocks, vector. Of each group of sixteen the codes are multiplied by x as they are; the scale is
// applied once to the partial sums, and the minimum once to the sum of x over the group.
#include "cpu/element.h"
#include "ops/formats/gguf_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

constexpr int kParts = kGroup / kLanes;

// One row of W times B rows of x.
template <typename Block, int B>
inline void dot(float (&y)[B], const uint8_t* blocks, const float* x, const float* sums, int64_t cols) {
    F acc[B][2];
    float low[B] = {};
    for (int b = 0; b < B; ++b) acc[b][0] = acc[b][1] = splat(0.0f);
    for (int64_t column = 0; column < cols; column += Block::kValues, blocks += Block::kBytes) {
        for_groups<Block>([&](auto g) __attribute__((always_inline)) {
            GgufGroup group;
            Block::group(group, blocks, g);
            F q[kParts];
            for (int p = 0; p < kParts; ++p) q[p] = load_codes(group.q + p * kLanes);
            const F scale = splat(group.scale);
            for (int b = 0; b < B; ++b) {
                const float* xs = x + b * cols + column + kGroup * g;
                F part = mul(q[0], load(xs));
                for (int p = 1; p < kParts; ++p) part = fused(q[p], load(xs + p * kLanes), part);
                acc[b][g % 2] = fused(part, scale, acc[b][g % 2]);
                if constexpr (Block::kMin) low[b] += group.min * sums[(b * cols + column) / kGroup + g];
            }
        });
    }
    for (int b = 0; b < B; ++b) y[b] = sum(add(acc[b][0], acc[b][1])) - low[b];
}

template <typename Block, int B>
inline void row_times(const GgufLinearArgs& a, const GgufRows& x, const uint8_t* blocks, int64_t row, int64_t m) {
    const int64_t line = row / a.rows * a.batch + m;
    float y[B];
    dot<Block, B>(y, blocks, x.x + line * a.cols, x.sums + line * (a.cols / kGroup), a.cols);
    for (int b = 0; b < B; ++b) write_element(a.y, a.dtype, (line + b) * a.rows + row % a.rows, y[b]);
}

void linear(const GgufLinearArgs& a, const GgufRows& x, int64_t begin, int64_t end) {
    with_gguf_block(a.type, [&](auto type) {
        using Block = decltype(type);
        for (int64_t row = begin; row < end; ++row) {
            const uint8_t* blocks = a.blocks + row * (a.cols / Block::kValues) * Block::kBytes;
            int64_t m = 0;
            for (; m + 4 <= a.batch; m += 4) row_times<Block, 4>(a, x, blocks, row, m);
            for (; m < a.batch; ++m) row_times<Block, 1>(a, x, blocks, row, m);
        }
    });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
