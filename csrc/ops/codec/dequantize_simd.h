// dequantize, vector: a block decoded in registers, one multiply, one store.
#pragma once

#include "codecs/block_scale.h"
#include "codecs/dispatch_simd.h"
#include "ops/codec/dequantize.h"

namespace kbitq::KBITQ_ISA {
namespace {

// Outputs of this size and more are not in a cache when their reader comes.
constexpr int64_t kStreamBytes = int64_t{64} << 20;

inline bool streams(const DequantizeArgs& a) {
    const int64_t row = a.packed.cols * dtype_size(a.dtype);
    return a.packed.rows * row >= kStreamBytes && a.packed.cols % kBlock == 0 &&
           reinterpret_cast<uintptr_t>(a.out) % 64 == 0;
}

template <typename C, DType kType, bool kStream>
[[gnu::noinline]] void dequantize_with(const DequantizeArgs& a, int64_t begin, int64_t end) {
    const float* scales = scale_table();
    const typename C::Decoder decoder(a.packed.codebook);
    BlockWalk at(begin, a.packed.cols);
    for (int64_t block = begin; block < end; ++block, at.next()) {
        F w[kVectors];
        const int64_t scale = scale_index_of<C>(a.packed, block, (*at).row, (*at).column);
        decode_weights(w, decoder, a.packed.words + block * C::kWords, scale_value(a.packed, scales, scale));
        store_block<kStream>(w, a.out, kType, at.first(), (*at).length);
    }
    if constexpr (kStream) stream_fence();
}

void dequantize(const DequantizeArgs& a, int64_t begin, int64_t end) {
    with_codec(a.packed, [&](auto codec) {
        using C = decltype(codec);
        with_element(a.dtype, [&](auto d) {
            streams(a) ? dequantize_with<C, d, true>(a, begin, end) : dequantize_with<C, d, false>(a, begin, end);
        });
    });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
