// NF4, one value at a time: reads as the definition, and is the code for machines without a vector version.
#include <cmath>

#include "cpu/element.h"
#include "format/nf4.h"
#include "ops/nf4/nf4_kernels.h"

namespace kbitq {
namespace {

// Codes of `count` values from an even place on, each already divided by its scale.
template <typename Normalise>
void pack_codes(const Nf4QuantizeArgs& a, int64_t first, int64_t count, const Normalise& normalise) {
    const auto code = [&](int64_t i) {
        if (i == first + count) return kNf4Zero;
        return nf4_code(normalise(read_element(a.w, a.dtype, i)), kNf4Bounds.bound);
    };
    for (int64_t i = first; i < first + count; i += 2)
        a.codes[i / 2] = static_cast<uint8_t>(code(i) << 4 | code(i + 1));
}

float largest(const Nf4QuantizeArgs& a, int64_t first, int64_t count) {
    float most = 0.0f;
    for (int64_t i = first; i < first + count; ++i) most = std::fmax(most, std::fabs(read_element(a.w, a.dtype, i)));
    return most;
}

void quantize(const Nf4QuantizeArgs& a, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
        a.scales[b] = largest(a, b * a.block, a.block);
        const float inverse = 1.0f / std::fmax(a.scales[b], kNf4LeastScale);
        pack_codes(a, b * a.block, a.block, [inverse](float v) { return v * inverse; });
    }
}

void decode(const Nf4DequantizeArgs& a, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {
        const int code = i % 2 ? a.codes[i / 2] & 15 : a.codes[i / 2] >> 4;
        write_element(a.out, a.dtype, i, kNf4Level[code] * a.scales[first / a.block]);
    }
}

void dequantize(const Nf4DequantizeArgs& a, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) decode(a, b * a.block, a.block);
}

void linear(const Nf4LinearArgs& a, const void* arranged, int64_t begin, int64_t end) {
    const auto* x = static_cast<const float*>(arranged);
    const int64_t blocks = a.cols / a.block;
    for (int64_t row = begin; row < end; ++row) {
        const uint8_t* codes = a.codes + row * a.cols / 2;
        for (int64_t m = 0; m < a.batch; ++m) {
            float y = 0.0f;
            for (int64_t b = 0; b < blocks; ++b) {
                float part = 0.0f;
                for (int64_t i = b * a.block; i < (b + 1) * a.block; i += 2) {
                    part += kNf4Level[codes[i / 2] >> 4] * x[m * a.cols + i];
                    part += kNf4Level[codes[i / 2] & 15] * x[m * a.cols + i + 1];
                }
                y += a.scales[row * blocks + b] * part;
            }
            if (a.bias) y += read_element(a.bias, a.dtype, row);
            write_element(a.y, a.dtype, m * a.rows + row, y);
        }
    }
}

}  // namespace

// As bitsandbytes does it: unlike a whole block, this one is divided by its scale, and stores no scale below the least.
void nf4_quantize_tail(const Nf4QuantizeArgs& a) {
    const int64_t count = a.count % a.block, first = a.count - count;
    if (count == 0) return;
    const float scale = std::fmax(largest(a, first, count), kNf4LeastScale);
    a.scales[first / a.block] = scale;
    pack_codes(a, first, count, [scale](float v) { return v / scale; });
}

void nf4_dequantize_tail(const Nf4DequantizeArgs& a) { decode(a, a.count - a.count % a.block, a.count % a.block); }

const Nf4Kernels kScalarNf4 = {quantize, dequantize, {DType::f32, 1, 1, linear, nullptr}};

}  // namespace kbitq
