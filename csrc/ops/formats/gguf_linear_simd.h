// y = x W^T from GGUF blocks, vector. Of each group of sixteen the codes are multiplied by one row of x as they are
// and the scale is applied to the partial sums; for several rows the codes are scaled. The minimum is applied once to
// the sum of x over the group.
#include "cpu/element.h"
#include "ops/formats/gguf_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

constexpr int kParts = kGroup / kLanes;

// What a row of W has gathered of B rows of x.
template <int B>
struct Gathered {
    F even[B], odd[B], minima[B];
    float rest[B];  // of minima: groups that fill no vector
};

// Group g of a row of W times B rows of x.
template <int B>
[[gnu::always_inline]] inline void add_group(F (&to)[B], const GgufRun& run, int g, const float* x, int64_t cols) {
    F q[kParts];
    for (int p = 0; p < kParts; ++p) q[p] = load_codes(run.q + kGroup * g + p * kLanes);
    const F scale = splat(run.scale[g]);
    if constexpr (B == 1) {
        F part = mul(q[0], load(x + kGroup * g));
        for (int p = 1; p < kParts; ++p) part = fused(q[p], load(x + kGroup * g + p * kLanes), part);
        to[0] = fused(part, scale, to[0]);
    } else {
        for (int p = 0; p < kParts; ++p) {
            const F w = mul(q[p], scale);
            for (int b = 0; b < B; ++b) to[b] = fused(w, load(x + b * cols + kGroup * g + p * kLanes), to[b]);
        }
    }
}

// Adds `count` groups, an even number; `sums` are those of x by group.
template <int B>
[[gnu::always_inline]] inline void add_run(Gathered<B>& to, const GgufRun& run, int count, const float* x,
                                           const float* sums, int64_t cols) {
    for (int g = 0; g < count; g += 2) {
        add_group<B>(to.even, run, g, x, cols);
        add_group<B>(to.odd, run, g + 1, x, cols);
    }
    if (!run.has_min) return;
    for (int b = 0; b < B; ++b) {
        const float* of_x = sums + b * (cols / kGroup);
        int g = 0;
        for (; g + kLanes <= count; g += kLanes) to.minima[b] = fused(load(run.min + g), load(of_x + g), to.minima[b]);
        for (; g < count; ++g) to.rest[b] += run.min[g] * of_x[g];
    }
}

// A row of W times B rows of x, the first of which is `line`.
template <int B>
void row_times(const GgufLinearArgs& a, GgufReader read, const GgufRows& x, int64_t row, int64_t line) {
    const GgufSizes sizes = gguf_sizes(a.type);
    const int most = gguf_run_blocks(sizes);
    const int64_t blocks = a.cols / sizes.values;
    const uint8_t* from = a.blocks + row * blocks * sizes.bytes;
    GgufRun run;
    Gathered<B> all;
    for (int b = 0; b < B; ++b) {
        all.even[b] = all.odd[b] = all.minima[b] = splat(0.0f);
        all.rest[b] = 0.0f;
    }
    for (int64_t block = 0; block < blocks; block += most) {
        const int count = blocks - block < most ? static_cast<int>(blocks - block) : most;
        read(from + block * sizes.bytes, count, run);
        const int groups = count * sizes.values / kGroup;
        const int64_t at = line * a.cols + block * sizes.values;
        add_run<B>(all, run, groups, x.x + at, x.sums + at / kGroup, a.cols);
    }
    for (int b = 0; b < B; ++b) {
        const float y = sum(add(all.even[b], all.odd[b])) - (sum(all.minima[b]) + all.rest[b]);
        write_element(a.y, a.dtype, (line + b) * a.rows + row % a.rows, y);
    }
}

void linear(const GgufLinearArgs& a, GgufReader read, const GgufRows& x, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        int64_t line = row / a.rows * a.batch;
        const int64_t stop = line + a.batch;
        for (; line + 4 <= stop; line += 4) row_times<4>(a, read, x, row, line);
        for (; line + 2 <= stop; line += 2) row_times<2>(a, read, x, row, line);
        for (; line < stop; ++line) row_times<1>(a, read, x, row, line);
    }
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
