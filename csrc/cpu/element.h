// Reading and writing one element or one block of any source type. In an unnamed namespace on purpose: every
// instruction set compiles its own copy (see cmake/simd.cmake).
#pragma once

#include <cstdint>
#include <cstring>

#include "format/half.h"

namespace kbitq {
namespace {

[[maybe_unused]] inline float read_element(const void* p, DType dtype, int64_t i) {
    if (dtype == DType::f32) return static_cast<const float*>(p)[i];
    const uint16_t h = static_cast<const uint16_t*>(p)[i];
    return dtype == DType::bf16 ? bf16_to_float(h) : f16_to_float(h);
}

[[maybe_unused]] inline void write_element(void* p, DType dtype, int64_t i, float v) {
    if (dtype == DType::f32) {
        static_cast<float*>(p)[i] = v;
    } else {
        static_cast<uint16_t*>(p)[i] = dtype == DType::bf16 ? float_to_bf16(v) : float_to_f16(v);
    }
}

// Where a block lies in its matrix.
struct BlockAt {
    int64_t row, column;  // of its first element
    int length;           // 32, or fewer at a row's end
};

[[maybe_unused]] inline BlockAt block_at(int64_t block, int64_t cols) {
    const int64_t nblk = blocks_per_row(cols);
    const int64_t row = block / nblk, column = (block % nblk) * kBlock;
    const int64_t left = cols - column;
    return {row, column, left < kBlock ? static_cast<int>(left) : kBlock};
}

// Walks over neighbouring blocks: block_at without its division.
class BlockWalk {
  public:
    BlockWalk(int64_t block, int64_t cols) : at_(block_at(block, cols)), cols_(cols) {}
    const BlockAt& operator*() const { return at_; }
    int64_t first() const { return at_.row * cols_ + at_.column; }  // the block's first element in the matrix
    void next() {
        at_.column += kBlock;
        if (at_.column >= cols_) {
            at_.column = 0;
            ++at_.row;
        }
        const int64_t left = cols_ - at_.column;
        at_.length = left < kBlock ? static_cast<int>(left) : kBlock;
    }

  private:
    BlockAt at_;
    int64_t cols_;
};

}  // namespace
}  // namespace kbitq
