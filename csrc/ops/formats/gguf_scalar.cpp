// GGUF blocks one element at a time: what the vector kernels are held against.
#include "cpu/element.h"
#include "ops/formats/gguf_reader.h"

namespace kbitq {
namespace {

void decode(const GgufDecodeArgs& a, const GgufRun& run, int count, int64_t first) {
    with_element(a.dtype, [&](auto d) {
        Stored<d>* out = static_cast<Stored<d>*>(a.out) + first;
        for (int g = 0; g < count; ++g) {
            const float scale = run.scale[g], min = run.has_min ? run.min[g] : 0.0f;
            for (int i = kGroup * g; i < kGroup * (g + 1); ++i) {
                const float scaled = scale * static_cast<float>(run.q[i]);
                out[i] = round_to<d>(scaled - min);
            }
        }
    });
}

float dot(const GgufLinearArgs& a, GgufReader read, const uint8_t* blocks, const float* x) {
    const GgufSizes sizes = gguf_sizes(a.type);
    GgufRun run;
    float sum = 0.0f;
    for (int64_t column = 0; column < a.cols; column += sizes.values, blocks += sizes.bytes) {
        read(blocks, 1, run);
        for (int g = 0; g < sizes.values / kGroup; ++g) {
            const float scale = run.scale[g], min = run.has_min ? run.min[g] : 0.0f;
            for (int i = kGroup * g; i < kGroup * (g + 1); ++i) {
                const float scaled = scale * static_cast<float>(run.q[i]);
                sum += (scaled - min) * x[column + i];
            }
        }
    }
    return sum;
}

void linear(const GgufLinearArgs& a, GgufReader read, const GgufRows& x, int64_t begin, int64_t end) {
    const GgufSizes sizes = gguf_sizes(a.type);
    for (int64_t row = begin; row < end; ++row) {
        const uint8_t* blocks = a.blocks + row * (a.cols / sizes.values) * sizes.bytes;
        const int64_t expert = row / a.rows, within = row % a.rows;
        for (int64_t m = 0; m < a.batch; ++m) {
            const int64_t line = expert * a.batch + m;
            write_element(a.y, a.dtype, line * a.rows + within, dot(a, read, blocks, x.x + line * a.cols));
        }
    }
}

}  // namespace

const GgufKernels kScalarGguf = {reader_of, decode};
const GgufLinear kScalarGgufLinear = linear;

}  // namespace kbitq
