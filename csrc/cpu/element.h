// Reading and writing one element of any type, and where a block lies in its matrix. In an unnamed namespace on
// purpose: every instruction set compiles its own copy (cmake/simd.cmake).
#pragma once

#include <cstdint>

#include "format/block.h"
#include "format/half.h"

namespace kbitq {
namespace {

[[maybe_unused]] inline float read_element(const void* p, DType dtype, int64_t i) {
    return with_element(dtype, [&](auto d) { return widen<d>(static_cast<const Stored<d>*>(p)[i]); });
}

[[maybe_unused]] inline void write_element(void* p, DType dtype, int64_t i, float v) {
    with_element(dtype, [&](auto d) { static_cast<Stored<d>*>(p)[i] = round_to<d>(v); });
}

// Where a block lies in its matrix.
struct BlockAt {
    int64_t row, column;  // of its first element
    int length;           // kBlock, or fewer at a row's end
};

[[maybe_unused]] inline int block_length(int64_t column, int64_t cols) {
    return cols - column < kBlock ? static_cast<int>(cols - column) : kBlock;
}

[[maybe_unused]] inline BlockAt block_at(int64_t block, int64_t cols) {
    const int64_t nblk = blocks_per_row(cols);
    const int64_t row = block / nblk, column = (block % nblk) * kBlock;
    return {row, column, block_length(column, cols)};
}

// Walks over neighbouring blocks: block_at without its division.
class BlockWalk {
  public:
    BlockWalk(int64_t block, int64_t cols)
        : at_(block_at(block, cols)), first_(at_.row * cols + at_.column), cols_(cols) {}
    const BlockAt& operator*() const { return at_; }
    int64_t first() const { return first_; }  // the block's first element in the matrix
    void next() {
        first_ += at_.length;
        at_.column += kBlock;
        if (at_.column >= cols_) {
            at_.column = 0;
            ++at_.row;
        }
        at_.length = block_length(at_.column, cols_);
    }

  private:
    BlockAt at_;
    int64_t first_, cols_;
};

}  // namespace
}  // namespace kbitq
