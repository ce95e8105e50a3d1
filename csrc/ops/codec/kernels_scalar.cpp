// The codec one element at a time: it reads as format.md section 3 does, and is what the vector kernels are held
// against.
#include <cmath>

#include "cpu/element.h"
#include "format/scale_e4m4.h"
#include "ops/codec/kernels.h"

namespace kbitq {
namespace {

// The 32 terms of a block added as a warp would: i+16 to i, then i+8, i+4, i+2, i+1.
template <typename T>
T tree_sum(T (&term)[kBlock]) {
    for (int half = kBlock / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) term[i] += term[i + half];
    }
    return term[0];
}

int nearest(const QuantizeTables& t, int k, float v, float s) {
    if (s == 0.0f) return t.zero;
    int index = 0;
    with_bits(k, [&](auto bits) { index = nearest_index<bits>(t.mid, v, s); });
    return index;
}

// One block of v = W * 2^-x, zeros past its end.
struct Block {
    float v[kBlock];
    float weight[kBlock];  // importance, 1 without; 0 past the end
    int length;
    float most;  // max |v|
};

Block read_block(const QuantizeArgs& a, const QuantizeTables& t, const BlockAt& at) {
    Block b{};
    b.length = at.length;
    const float* importance = nullptr;
    if (a.importance)
        importance = a.importance + at.row / (a.packed.rows / a.importance_rows) * a.packed.cols + at.column;
    bool any = false;
    for (int i = 0; i < at.length; ++i) {
        b.v[i] = read_element(a.w, a.dtype, at.row * a.packed.cols + at.column + i) * t.to_blocks;
        b.most = std::fmax(b.most, std::fabs(b.v[i]));
        b.weight[i] = importance ? importance[i] : 1.0f;
        any = any || b.weight[i] != 0.0f;
    }
    for (int i = 0; i < at.length && !any; ++i) b.weight[i] = 1.0f;
    return b;
}

float error_of(const QuantizeArgs& a, const QuantizeTables& t, const Block& b, float s) {
    float e[kBlock] = {};
    for (int i = 0; i < b.length; ++i) {
        const float d = b.v[i] - t.levels[nearest(t, a.packed.k, b.v[i], s)] * s;
        e[i] = (d * d) * b.weight[i];
    }
    return tree_sum(e);
}

int clip_byte(int byte, int top) { return byte < 0 ? 0 : byte > top ? top : byte; }

int choose_byte(const QuantizeArgs& a, const QuantizeTables& t, const Block& b) {
    if (b.most == 0.0f) return 0;
    const int base = static_cast<int>(encode_e4m4(b.most));
    if (a.rule == ScaleRule::absmax) return clip_byte(base, t.top);
    int best = 0;
    float least = INFINITY;
    for (int d = first_candidate(a.packed.k); d <= kLastCandidate; d += candidate_step(a.packed.k)) {
        const int byte = clip_byte(base + d, t.top);  // ascending: a strict < keeps the smallest byte on a tie
        const float error = error_of(a, t, b, decode_e4m4(byte));
        if (error < least) {
            least = error;
            best = byte;
        }
    }
    return best;
}

void quantize_scalar(const QuantizeArgs& a, const QuantizeTables& t, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
        const Block b = read_block(a, t, block_at(block, a.packed.cols));
        float s = b.most;
        if (a.packed.float_scales) {
            a.packed.float_scales[block] = b.most;
        } else {
            const int byte = choose_byte(a, t, b);
            a.packed.scales[block] = static_cast<uint8_t>(byte);
            s = decode_e4m4(byte);
        }
        uint32_t plane[kMaxBits] = {};
        for (int i = 0; i < kBlock; ++i) {
            const int index = i < b.length ? nearest(t, a.packed.k, b.v[i], s) : t.zero;
            for (int j = 0; j < a.packed.k; ++j) plane[j] |= static_cast<uint32_t>((index >> j) & 1) << i;
        }
        for (int j = 0; j < a.packed.k; ++j) a.packed.words[block * a.packed.k + j] = plane[j];
    }
}

// W' of one block: what the decode rule gives, in float32.
template <typename Args>
void decode_block(const Args& a, int64_t block, float (&w)[kBlock]) {
    const float s = a.packed.float_scales ? a.packed.float_scales[block] : decode_e4m4(a.packed.scales[block]);
    for (int i = 0; i < kBlock; ++i) {
        int index = 0;
        for (int j = 0; j < a.packed.k; ++j)
            index |= static_cast<int>(a.packed.words[block * a.packed.k + j] >> i & 1u) << j;
        w[i] = a.packed.codebook[index] * s;
    }
}

void dequantize_scalar(const DequantizeArgs& a, int64_t begin, int64_t end) {
    float w[kBlock];
    for (int64_t block = begin; block < end; ++block) {
        const BlockAt at = block_at(block, a.packed.cols);
        decode_block(a, block, w);
        for (int i = 0; i < at.length; ++i) write_element(a.out, a.dtype, at.row * a.packed.cols + at.column + i, w[i]);
    }
}

void stats_scalar(const StatsArgs& a, int64_t begin, int64_t end) {
    const int64_t nblk = blocks_per_row(a.packed.cols);
    for (int64_t row = begin; row < end; ++row) {
        double signal = 0, noise = 0, worst = 0;
        for (int64_t b = 0; b < nblk; ++b) {
            const BlockAt at = block_at(row * nblk + b, a.packed.cols);
            float decoded[kBlock];
            decode_block(a, row * nblk + b, decoded);
            double ww[kBlock] = {}, ee[kBlock] = {};
            for (int i = 0; i < at.length; ++i) {
                const double w = read_element(a.w, a.dtype, row * a.packed.cols + at.column + i);
                const double e = w - static_cast<double>(decoded[i]);
                ww[i] = w * w;
                ee[i] = e * e;
                worst = std::fmax(worst, std::fabs(e));
            }
            signal += tree_sum(ww);
            noise += tree_sum(ee);
        }
        double* out = a.out + row * kStatsColumns;
        out[0] = signal;
        out[1] = noise;
        out[2] = worst;
    }
}

void scan_scalar(const ScanArgs& a, int64_t begin, int64_t end, ScanRange& out) {
    out = {0.0f, 0, -1};
    for (int64_t i = begin; i < end; ++i) {
        const float m = std::fabs(read_element(a.w, a.dtype, i));
        if (m < INFINITY) {
            out.amax = std::fmax(out.amax, m);
        } else if (out.nonfinite++ == 0) {
            out.first = i;
        }
    }
}

}  // namespace

const Kernels kScalarKernels = {scan_scalar, quantize_scalar, dequantize_scalar, stats_scalar};

}  // namespace kbitq
