#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/element.h"
#include "cpu/parallel.h"
#include "cpu/simd_level.h"
#include "ops/linear/linear_kernels.h"

namespace kbitq {
namespace {

constexpr int64_t kGrainBlocks = 4096;  // 131,072 weights: some twenty microseconds

// Rows of x as they are, with zeros up to whole blocks.
template <typename T>
void pad_rows(const T* x, int64_t rows, int64_t cols, T* out) {
    const int64_t padding = blocks_per_row(cols) * kBlock - cols;
    for (int64_t m = 0; m < rows; ++m, x += cols) {
        out = std::copy(x, x + cols, out);
        out = std::fill_n(out, padding, T{});
    }
}

// x in the type and order of the kernel's lanes, once a call: every row of W reads it.
template <DType From, DType To>
void arrange_as(const LinearArgs& a, int vectors, Stored<To>* out) {
    const int64_t cols = a.weight.cols, nblk = blocks_per_row(cols);
    const int lanes = kBlock / vectors;
    const auto* x = static_cast<const Stored<From>*>(a.x);
    if constexpr (From == To) {
        if (vectors == 1) return pad_rows(x, a.batch, cols, out);
    }
    for (int64_t m = 0; m < a.batch; ++m, x += cols) {
        for (int64_t b = 0; b < nblk; ++b, out += kBlock) {
            const int length = block_length(b * kBlock, cols);
            for (int i = 0; i < kBlock; ++i) {
                Stored<To>& element = out[lanes * (i % vectors) + i / vectors];
                element = i < length ? round_to<To>(widen<From>(x[b * kBlock + i])) : Stored<To>{};
            }
        }
    }
}

// Vectors are loaded whole lines at a time.
struct alignas(64) Line {
    std::byte bytes[64];
};

// What the kernel reads: x itself where it is as wanted, else a copy in `buffer`.
const void* arranged(const LinearArgs& a, const LinearKernel& kernel, std::vector<Line>& buffer) {
    if (kernel.x == a.dtype && kernel.vectors == 1 && a.weight.cols % kBlock == 0) return a.x;
    const int64_t bytes = a.batch * blocks_per_row(a.weight.cols) * kBlock * dtype_size(kernel.x);
    buffer.resize(static_cast<size_t>(bytes) / sizeof(Line));  // a block is one line or two
    with_element(a.dtype, [&](auto from) {
        with_element(kernel.x, [&](auto to) {
            arrange_as<from, to>(a, kernel.vectors, reinterpret_cast<Stored<to>*>(buffer.data()));
        });
    });
    return buffer.data();
}

}  // namespace

const LinearKernel& linear_kernel(DType x) {
    (void)x;
#if defined(KBITQ_AVX512_BF16)
    if (x == DType::bf16 && multiplies_bf16()) return kAvx512Bf16Linear;
#endif
    return KBITQ_AT_SIMD_LEVEL(Linear);
}

void linear_cpu(const LinearArgs& a, int threads) {
    // Kept: a decode step calls this with the same sizes again and again.
    static thread_local std::vector<Line> buffer;
    const LinearKernel& kernel = linear_kernel(a.dtype);
    const void* x = arranged(a, kernel, buffer);
    parallel_for_in_turn(a.weight.rows, kGrainBlocks / (blocks_per_row(a.weight.cols) + 1) + 1, threads,
                         [&](int64_t begin, int64_t end) { kernel.linear(a, x, begin, end); });
}

}  // namespace kbitq
