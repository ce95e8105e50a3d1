// A codec that stands in this file alone, through the vector ops: what a new header in csrc/codecs/ has to say, and
// that the ops take it as they are. It stores the index of a level as a byte: 8 words a block, 256 levels.
#include <cmath>
#include <cstdio>
#include <vector>

#if defined(__AVX512BF16__)
#include "cpu/simd_avx512.h"
#define KBITQ_ISA avx512
#include "ops/linear/linear_bf16.h"
#else
#include "cpu/simd_avx2.h"
#define KBITQ_ISA avx2
#endif
#include "ops/codec/dequantize_simd.h"
#include "ops/codec/quantize_simd.h"
#include "ops/codec/stats_simd.h"
#include "ops/linear/linear_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

struct ToyTables : EncodeTables {
    float levels[256];
};

class ToyDecoder {
  public:
    explicit ToyDecoder(const float* codebook) : codebook_(codebook) {}

    template <Order kOrder>
    void decode_block(F (&level)[kVectors], const uint32_t* words) const {
        float values[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            const int at = kOrder == Order::row ? i : kLanes * (i % kVectors) + i / kVectors;
            values[at] = codebook_[words[i / 4] >> (8 * (i % 4)) & 0xFFu];
        }
        for (int q = 0; q < kVectors; ++q) level[q] = load(values + q * kLanes);
    }

  private:
    const float* codebook_;
};

class ToyEncoder {
  public:
    explicit ToyEncoder(const EncodeTables& tables) : t_(static_cast<const ToyTables&>(tables)) {}

    void encode_block(const SourceBlock& b, ScaleRule, uint32_t* words, uint8_t* scale) const {
        *scale = static_cast<uint8_t>(encode_e4m4(b.most));
        const float s = decode_e4m4(*scale);
        float values[kBlock];
        for (int q = 0; q < kVectors; ++q) store(values + q * kLanes, b.v[q]);
        for (int j = 0; j < kBlock / 4; ++j) words[j] = 0;
        for (int i = 0; i < kBlock; ++i) {
            uint32_t best = 0;
            for (uint32_t n = 1; n < 256; ++n) {
                if (std::fabs(t_.levels[n] * s - values[i]) < std::fabs(t_.levels[best] * s - values[i])) best = n;
            }
            words[i / 4] |= best << (8 * (i % 4));
        }
    }

  private:
    const ToyTables& t_;
};

struct Toy {
    static constexpr int kWords = 8;
    static constexpr int kScaleBlocks = 1;
    static constexpr bool kTogether = false;
    using Decoder = ToyDecoder;
    using Encoder = ToyEncoder;
};

bool near(double a, double b, double tolerance) { return std::fabs(a - b) <= tolerance; }

int fail(const char* what) {
    std::printf("%s\n", what);
    return 1;
}

// Does linear give the product of x and w? Of its three rows of x, two go through the loops together and one alone.
template <typename Product, DType D>
bool multiplies(const PackedMatrix& packed, const std::vector<float>& w, int vectors) {
    constexpr int64_t kBatch = 3;
    const int64_t cols = packed.cols, blocks = blocks_per_row(cols), lanes = kBlock / vectors;
    const auto element = [](int64_t m, int64_t c) { return static_cast<float>((m + c) % 7) - 3; };
    std::vector<Stored<D>> x(kBatch * blocks * kBlock);  // as linear_cpu.cpp arranges it
    for (int64_t m = 0; m < kBatch; ++m) {
        for (int64_t c = 0; c < cols; ++c) {
            const int64_t i = c % kBlock, at = lanes * (i % vectors) + i / vectors;
            x[(m * blocks + c / kBlock) * kBlock + at] = round_to<D>(element(m, c));
        }
    }
    std::vector<float> y(kBatch * packed.rows);
    linear_with<Toy, Product>({nullptr, DType::f32, kBatch, packed, nullptr, y.data()}, x.data(), 0, packed.rows);
    const double tolerance = D == DType::f32 ? 1e-3 : 0.5;
    for (int64_t m = 0; m < kBatch; ++m) {
        for (int64_t r = 0; r < packed.rows; ++r) {
            double sum = 0;
            for (int64_t c = 0; c < cols; ++c) sum += double{w[r * cols + c]} * element(m, c);
            if (!near(y[m * packed.rows + r], sum, tolerance)) return false;
        }
    }
    return true;
}

int round_trip() {
    constexpr int64_t kRows = 3, kCols = 70, kBlocks = 3;
    ToyTables tables{};
    tables.to_blocks = 1.0f;
    tables.top = kScaleBytes - 1;
    for (int i = 0; i < 256; ++i) tables.levels[i] = static_cast<float>(i - 127) / 127;
    std::vector<float> w(kRows * kCols), back(w.size(), 9.0f);
    for (size_t i = 0; i < w.size(); ++i) w[i] = std::sin(static_cast<float>(i) * 1.7f);
    std::vector<uint32_t> words(kRows * kBlocks * Toy::kWords);
    std::vector<uint8_t> scales(kRows * kBlocks);
    const PackedOutput packed{Codec::planes, 8, 1, kRows, kCols, 1, words.data(), scales.data(), nullptr,
                              tables.levels};

    const QuantizeArgs quantize{w.data(), DType::f32, ScaleRule::absmax, tables.levels, nullptr, nullptr, 0, packed};
    quantize_with<Toy, false>(quantize, tables, 0, kRows * kBlocks);
    const DequantizeArgs dequantize{read_only(packed), back.data(), DType::f32};
    dequantize_with<Toy, DType::f32, false>(dequantize, 0, kRows * kBlocks);
    std::vector<double> sums(kRows * kStatsColumns);
    stats_with<Toy, DType::f32>({w.data(), DType::f32, read_only(packed), sums.data()}, 0, kRows);

    double noise = 0, signal = 0;
    for (size_t i = 0; i < w.size(); ++i) {
        if (!near(w[i], back[i], 0.04)) return fail("dequantize: not what was quantized");
        signal += double{w[i]} * w[i];
        noise += std::pow(double{w[i]} - back[i], 2);
    }
    if (!near(sums[0] + sums[3] + sums[6], signal, 1e-9)) return fail("stats: signal");
    if (!near(sums[1] + sums[4] + sums[7], noise, 1e-9)) return fail("stats: noise");

    if (!multiplies<FloatProduct<Toy>, DType::f32>(read_only(packed), back, kVectors)) return fail("linear: float32");
#if defined(__AVX512BF16__)
    if (!multiplies<Bf16Product<Toy>, DType::bf16>(read_only(packed), back, 1)) return fail("linear: bfloat16");
#endif
    return 0;
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA

int main() { return kbitq::KBITQ_ISA::round_trip(); }
