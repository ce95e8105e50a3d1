// GGUF blocks one element at a time: what the vector kernels are held against.
#include "cpu/element.h"
#include "ops/formats/gguf_groups.h"
#include "ops/formats/gguf_kernels.h"

namespace kbitq {
namespace {

void decode(const GgufDecodeArgs& a, int64_t begin, int64_t end) {
    with_gguf_block(a.type, [&](auto type) {
        using Block = decltype(type);
        for (int64_t block = begin; block < end; ++block) {
            for_groups<Block>([&](auto g) {
                GgufGroup group;
                Block::group(group, a.blocks + block * Block::kBytes, g);
                const int64_t first = block * Block::kValues + kGroup * g;
                for (int i = 0; i < kGroup; ++i) {
                    const float scaled = group.scale * static_cast<float>(group.q[i]);
                    write_element(a.out, a.dtype, first + i, scaled - group.min);
                }
            });
        }
    });
}

template <typename Block>
float dot(const uint8_t* blocks, const float* x, int64_t cols) {
    float sum = 0.0f;
    for (int64_t column = 0; column < cols; column += Block::kValues, blocks += Block::kBytes) {
        for_groups<Block>([&](auto g) {
            GgufGroup group;
            Block::group(group, blocks, g);
            for (int i = 0; i < kGroup; ++i) {
                const float scaled = group.scale * static_cast<float>(group.q[i]);
                sum += (scaled - group.min) * x[column + kGroup * g + i];
            }
        });
    }
    return sum;
}

void linear(const GgufLinearArgs& a, const GgufRows& x, int64_t begin, int64_t end) {
    with_gguf_block(a.type, [&](auto type) {
        using Block = decltype(type);
        for (int64_t row = begin; row < end; ++row) {
            const uint8_t* blocks = a.blocks + row * (a.cols / Block::kValues) * Block::kBytes;
            const int64_t expert = row / a.rows, within = row % a.rows;
            for (int64_t m = 0; m < a.batch; ++m) {
                const int64_t line = expert * a.batch + m;
                write_element(a.y, a.dtype, line * a.rows + within, dot<Block>(blocks, x.x + line * a.cols, a.cols));
            }
        }
    });
}

}  // namespace

const GgufDecode kScalarGgufDecode = decode;
const GgufLinear kScalarGgufLinear = linear;

}  // namespace kbitq
