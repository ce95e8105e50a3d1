// dequantize, vector: plane words to indices through masks, levels from registers, one multiply, one store.
#pragma once

#include "codecs/planes_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

// Outputs of this size and more are not in a cache when their reader comes.
constexpr int64_t kStreamBytes = int64_t{64} << 20;

inline bool streams(const DequantizeArgs& a) {
    const int64_t row = a.packed.cols * dtype_size(a.dtype);
    return a.packed.rows * row >= kStreamBytes && a.packed.cols % kBlock == 0 &&
           reinterpret_cast<uintptr_t>(a.out) % 64 == 0;
}

template <int K, bool kStream>
void dequantize_k(const DequantizeArgs& a, int64_t begin, int64_t end) {
    const float* scales = scale_table();
    const Levels<K> levels(a.packed.codebook);
    BlockWalk at(begin, a.packed.cols);
    for (int64_t block = begin; block < end; ++block, at.next()) {
        F w[kVectors];
        decode_block<K>(w, a.packed.words + block * K, levels, block_scale(a.packed, scales, block));
        store_block<kStream>(w, a.out, a.dtype, at.first(), (*at).length);
    }
    if constexpr (kStream) stream_fence();
}

void dequantize(const DequantizeArgs& a, int64_t begin, int64_t end) {
    with_bits(a.packed.k, [&](auto bits) {
        streams(a) ? dequantize_k<bits, true>(a, begin, end) : dequantize_k<bits, false>(a, begin, end);
    });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
