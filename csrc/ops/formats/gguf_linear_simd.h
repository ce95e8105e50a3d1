// y = x W^T from GGUF blocks, vector. Of each group of sixteen the codes are multiplied by one row of x as they are
// and the scale is applied to the partial sums; for several rows the codes are scaled. The minimum is applied once to
// the sum of x over the group.
#include "cpu/element.h"
#include "ops/formats/gguf_groups.h"
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

// One row of W times one row of x, straight from the blocks.
template <typename Block>
float dot(const uint8_t* blocks, const float* x, const float* sums, int64_t count) {
    F even = splat(0.0f), odd = splat(0.0f);
    float minima = 0.0f;
    for (int64_t block = 0; block < count; ++block, blocks += Block::kBytes, x += Block::kValues) {
        for_groups<Block>([&](auto g) __attribute__((always_inline)) {
            GgufGroup group;
            Block::group(group, blocks, g);
            F part = mul(load_codes(group.q), load(x + kGroup * g));
            for (int p = 1; p < kParts; ++p) {
                part = fused(load_codes(group.q + p * kLanes), load(x + kGroup * g + p * kLanes), part);
            }
            F& to = g % 2 ? odd : even;
            to = fused(part, splat(group.scale), to);
            if constexpr (Block::kMin) minima += group.min * sums[Block::kGroups * block + g];
        });
    }
    return sum(add(even, odd)) - minima;
}

// The types whose codes are quick to come by: to leave them in memory first took 1.15 to 1.8 times as long.
using Straight = GgufBlocks<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q8_K, Iq4Nl, Iq4Xs, Mxfp4, Tq2_0, Iq3S>;
using Dot = float (*)(const uint8_t* blocks, const float* x, const float* sums, int64_t count);

inline Dot dot_of(int type) {
    Dot found = nullptr;
    Straight::with(type, [&](auto block) { found = dot<decltype(block)>; });
    return found;
}

void linear_of_one(const GgufLinearArgs& a, Dot dot, const GgufRows& x, int64_t begin, int64_t end) {
    const GgufSizes sizes = gguf_sizes(a.type);
    const int64_t blocks = a.cols / sizes.values;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t line = row / a.rows;
        const float y =
            dot(a.blocks + row * blocks * sizes.bytes, x.x + line * a.cols, x.sums + line * (a.cols / kGroup), blocks);
        write_element(a.y, a.dtype, row, y);
    }
}

void linear(const GgufLinearArgs& a, GgufReader read, const GgufRows& x, int64_t begin, int64_t end) {
    const Dot straight = a.batch == 1 ? dot_of(a.type) : nullptr;
    if (straight != nullptr) return linear_of_one(a, straight, x, begin, end);
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
