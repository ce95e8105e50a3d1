// The blocks of GGUF files (ggml's types), one struct each: how many values a block has, its bytes, and how a group of
// sixteen neighbours is read from it. Layouts: ggml-org/ggml, ggml-common.h; checked bit by bit against the package
// gguf.
//
//   kType     ggml's number of the type           kMin   whether groups have a minimum to subtract
//   group     group g of the block: sixteen codes, their scale, their minimum
//
// CPU kernels inline a group for each number, so that every shift and offset below is a constant; on a GPU a lane has
// one.
#pragma once

#include "formats/gguf_bytes.h"
#include "formats/gguf_grids.h"

namespace kbitq {
namespace {

template <int Type, int Values, int Bytes, bool Min = false>
struct GgufBlock {
    static constexpr int kType = Type, kValues = Values, kBytes = Bytes, kGroups = Values / kGroup;
    static constexpr bool kMin = Min;
};

// --- 32 values under one scale ---------------------------------------------------------------------

struct Q4_0 : GgufBlock<2, 32, 18> {  // half d; low halves first
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        take_field(out.q, b + 2, 4 * g, 15, -8);
        out.scale = load_half(b);
        out.min = 0.0f;
    }
};

struct Q4_1 : GgufBlock<3, 32, 20, true> {  // half d, half m
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        take_field(out.q, b + 4, 4 * g, 15, 0);
        out.scale = load_half(b);
        out.min = -load_half(b + 2);
    }
};

// A fifth bit for each of 32 codes, in a word: as bytes with that bit at position 4.
KBITQ_GGUF void take_five(int8_t* q, const uint8_t* low, const uint8_t* bits, int g, int offset) {
    uint8_t high[kGroup];
    const uint32_t word = load_u16(bits + 2 * g);
    for (int half = 0; half < 2; ++half) {
        const uint64_t spread = ((word >> 8 * half & 0xFF) * kBytes01) & 0x8040201008040201ull;
        const uint64_t one = (((spread + 0x7F7F7F7F7F7F7F7Full) | spread) >> 7) & kBytes01;
        std::memcpy(high + 8 * half, &one, sizeof one);
    }
    take_two(q, low, 4 * g, high, 0, 1, offset);
}

struct Q5_0 : GgufBlock<6, 32, 22> {  // half d, 32 fifth bits
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        take_five(out.q, b + 6, b + 2, g, -16);
        out.scale = load_half(b);
        out.min = 0.0f;
    }
};

struct Q5_1 : GgufBlock<7, 32, 24, true> {
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        take_five(out.q, b + 8, b + 4, g, 0);
        out.scale = load_half(b);
        out.min = -load_half(b + 2);
    }
};

struct Q8_0 : GgufBlock<8, 32, 34> {
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        std::memcpy(out.q, b + 2 + kGroup * g, kGroup);
        out.scale = load_half(b);
        out.min = 0.0f;
    }
};

struct Iq4Nl : GgufBlock<20, 32, 18> {
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        take_levels(out.q, iq4_levels(), b + 2, 4 * g);
        out.scale = load_half(b);
        out.min = 0.0f;
    }
};

struct Mxfp4 : GgufBlock<39, 32, 17> {  // a bare exponent: half of 2^(e - 127), as the levels are twice those of E2M1
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        take_levels(out.q, e2m1_levels(), b + 1, 4 * g);
        const uint32_t e = b[0];
        out.scale = bits_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        out.min = 0.0f;
    }
};

// Half of an E4M3 without sign; 0x7F, its NaN, is 0.
KBITQ_GGUF float half_of_e4m3(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15, mantissa = byte & 7;
    if (byte == 0x7F) return 0.0f;
    if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-10f;
    return bits_float((exponent + 119) << 23 | mantissa << 20);
}

struct Nvfp4 : GgufBlock<40, 64, 36> {  // four scales, then eight bytes for each sixteen values
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        uint8_t codes[kGroup];
        for (int i = 0; i < 8; ++i) {
            codes[i] = b[4 + 8 * g + i];
            codes[8 + i] = b[4 + 8 * g + i] >> 4;
        }
        take_levels(out.q, e2m1_levels(), codes, 0);
        out.scale = half_of_e4m3(b[g]);
        out.min = 0.0f;
    }
};

// --- K: 256 values, scales of scales ---------------------------------------------------------------
// Two-bit fields lie as [2][4 shifts][32]: group g is half g / 8, shift g % 8 / 2, and the g % 2-th sixteen bytes.

KBITQ_GGUF constexpr int two_bit_bytes(int g) { return 32 * (g / 8) + kGroup * (g % 2); }
KBITQ_GGUF constexpr int two_bit_shift(int g) { return 2 * (g % 8 / 2); }

struct Q2_K : GgufBlock<10, 256, 84, true> {  // scales[16], codes[64], half d, half dmin
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        take_field(out.q, b + 16 + two_bit_bytes(g), two_bit_shift(g), 3, 0);
        out.scale = load_half(b + 80) * static_cast<float>(b[g] & 15);
        out.min = load_half(b + 82) * static_cast<float>(b[g] >> 4);
    }
};

struct Q3_K : GgufBlock<11, 256, 110> {  // third bits[32], codes[64], scales[12] of six bits, half d
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        const uint8_t* low = b + 32 + two_bit_bytes(g);
        const uint8_t* high = b + kGroup * (g % 2);
        for (int i = 0; i < kGroup; ++i) {
            const int third = high[i] >> (g / 2) & 1;
            out.q[i] = static_cast<int8_t>((low[i] >> two_bit_shift(g) & 3) + 4 * third - 4);
        }
        const int nibble = b[96 + g % 8] >> (g / 8 * 4) & 15, upper = b[104 + g % 4] >> (g / 4 * 2) & 3;
        out.scale = load_half(b + 108) * static_cast<float>((nibble | upper << 4) - 32);
        out.min = 0.0f;
    }
};

// Scale and minimum s of the eight pairs of six bits that Q4_K and Q5_K have in twelve bytes.
KBITQ_GGUF void take_pair(GgufGroup& out, const uint8_t* b, int s) {
    const uint8_t* packed = b + 4;
    int scale, min;
    if (s < 4) {
        scale = packed[s] & 63;
        min = packed[s + 4] & 63;
    } else {
        scale = (packed[s + 4] & 15) | (packed[s - 4] >> 6) << 4;
        min = packed[s + 4] >> 4 | (packed[s] >> 6) << 4;
    }
    out.scale = load_half(b) * static_cast<float>(scale);
    out.min = load_half(b + 2) * static_cast<float>(min);
}

struct Q4_K : GgufBlock<12, 256, 144, true> {  // half d, half dmin, pairs[12], codes[128]
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        take_field(out.q, b + 16 + 32 * (g / 4) + kGroup * (g % 2), 4 * (g / 2 % 2), 15, 0);
        take_pair(out, b, g / 2);
    }
};

struct Q5_K : GgufBlock<13, 256, 176, true> {  // as Q4_K, with fifth bits[32] before the codes
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        const uint8_t* low = b + 48 + 32 * (g / 4) + kGroup * (g % 2);
        take_two(out.q, low, 4 * (g / 2 % 2), b + 16 + kGroup * (g % 2), g / 2, 1, 0);
        take_pair(out, b, g / 2);
    }
};

struct Q6_K : GgufBlock<14, 256, 210> {  // low[128], high[64], signed scales[16], half d
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        const int half = g / 8, quarter = g / 2 % 4, at = kGroup * (g % 2);
        const uint8_t* low = b + 64 * half + 32 * (quarter % 2) + at;
        take_two(out.q, low, 4 * (quarter / 2), b + 128 + 32 * half + at, 2 * quarter, 3, -32);
        out.scale = load_half(b + 208) * static_cast<float>(static_cast<int8_t>(b[192 + g]));
        out.min = 0.0f;
    }
};

struct Q8_K : GgufBlock<15, 256, 292> {  // float d, codes[256], sums that only ggml's dot product reads
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        std::memcpy(out.q, b + 4 + kGroup * g, kGroup);
        out.scale = bits_float(load_u32(b));
        out.min = 0.0f;
    }
};

struct Iq4Xs : GgufBlock<23, 256, 136> {  // half d, upper scale bits, scales[4], codes[128]
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        const int chunk = g / 2;
        take_levels(out.q, iq4_levels(), b + 8 + kGroup * chunk, 4 * (g % 2));
        const int nibble = b[4 + chunk / 2] >> (chunk % 2 * 4) & 15;
        const int upper = static_cast<int>(load_u16(b + 2) >> 2 * chunk & 3);
        out.scale = load_half(b) * static_cast<float>((nibble | upper << 4) - 32);
        out.min = 0.0f;
    }
};

// --- ternary ---------------------------------------------------------------------------------------

KBITQ_GGUF constexpr int power_of_3(int n) { return n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81; }

// The digit of base 3 that multiplying by 3^n has moved to the top.
KBITQ_GGUF int8_t top_digit(uint8_t byte, int power) {
    return static_cast<int8_t>((static_cast<uint8_t>(byte * power) * 3 >> 8) - 1);
}

struct Tq1_0 : GgufBlock<34, 256, 54> {  // five digits a byte [32], [16], four a byte [4], half d
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        if (g < 15) {
            const int at = g < 10 ? kGroup * (g % 2) : 32, power = power_of_3(g < 10 ? g / 2 : g - 10);
            for (int i = 0; i < kGroup; ++i) out.q[i] = top_digit(b[at + i], power);
        } else {
            for (int n = 0, power = 1; n < 4; ++n, power *= 3) {
                for (int i = 0; i < 4; ++i) out.q[4 * n + i] = top_digit(b[48 + i], power);
            }
        }
        out.scale = load_half(b + 52);
        out.min = 0.0f;
    }
};

struct Tq2_0 : GgufBlock<35, 256, 66> {
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        take_field(out.q, b + two_bit_bytes(g), two_bit_shift(g), 3, -1);
        out.scale = load_half(b + 64);
        out.min = 0.0f;
    }
};

// --- I: points of a grid and signs -----------------------------------------------------------------

KBITQ_GGUF uint64_t iq2_point(uint32_t row) {  // 8, 25, 43
    const uint64_t codes = spread2(row);
    return kBytes01 * 8 + codes * 17 + (codes >> 1 & kBytes01);
}
KBITQ_GGUF uint64_t iq3_xxs_point(uint32_t first, uint32_t second) {  // 4, 12, 20, ... 52, 62
    const uint64_t codes = spread3(first, second);
    return kBytes01 * 4 + codes * 8 + ((codes + kBytes01) >> 3 & kBytes01) * 2;
}

struct Iq2Xxs : GgufBlock<16, 256, 66> {  // half d; for 32 values four rows of the grid, 4 x 7 signs, a scale
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        const uint8_t* rows = b + 2 + 8 * (g / 2);
        const uint32_t word = load_u32(rows + 4);
        for (int j = 0; j < 2; ++j) {
            const int at = 2 * (g % 2) + j;
            put_eight(out.q + 8 * j, negate_where(iq2_point(kGridIq2xxs[rows[at]]), even_signs(word >> 7 * at & 127)));
        }
        out.scale = load_half(b) * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
        out.min = 0.0f;
    }
};

struct Iq2Xs : GgufBlock<17, 256, 74> {  // half d, rows and signs [32] of 9 + 7 bits, scales[8]
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        for (int j = 0; j < 2; ++j) {
            const uint32_t word = load_u16(b + 2 + 2 * (2 * g + j));
            put_eight(out.q + 8 * j, negate_where(iq2_point(kGridIq2xs[word & 511]), even_signs(word >> 9)));
        }
        out.scale = load_half(b) * (0.5f + static_cast<float>(b[66 + g / 2] >> (g % 2 * 4) & 15)) * 0.25f;
        out.min = 0.0f;
    }
};

struct Iq2S : GgufBlock<22, 256, 82> {  // half d, rows[32], signs[32], upper bits of rows[8], scales[8]
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        for (int j = 0; j < 2; ++j) {
            const int at = 2 * g + j;
            const uint32_t row = b[2 + at] | (b[66 + at / 4] >> (at % 4 * 2) & 3u) << 8;
            put_eight(out.q + 8 * j, negate_where(iq2_point(kGridIq2s[row]), b[34 + at]));
        }
        out.scale = load_half(b) * (0.5f + static_cast<float>(b[74 + g / 2] >> (g % 2 * 4) & 15)) * 0.25f;
        out.min = 0.0f;
    }
};

struct Iq3Xxs : GgufBlock<18, 256, 98> {  // half d, rows[64] of four values, for 32 values 4 x 7 signs and a scale
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        const uint8_t* rows = b + 2 + 4 * g;
        const uint32_t word = load_u32(b + 66 + 4 * (g / 2));
        for (int j = 0; j < 2; ++j) {
            const uint64_t point = iq3_xxs_point(kGridIq3xxs[rows[2 * j]], kGridIq3xxs[rows[2 * j + 1]]);
            put_eight(out.q + 8 * j, negate_where(point, even_signs(word >> 7 * (2 * (g % 2) + j) & 127)));
        }
        out.scale = load_half(b) * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
        out.min = 0.0f;
    }
};

struct Iq3S : GgufBlock<21, 256, 110> {  // half d, rows[64], ninth bits of rows[8], signs[32], scales[4]
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        const uint8_t* rows = b + 2 + 4 * g;
        const uint32_t ninth = static_cast<uint32_t>(b[66 + g / 2]) >> (g % 2 * 4);
        for (int j = 0; j < 2; ++j) {
            const uint32_t first = rows[2 * j] | (ninth >> 2 * j & 1) << 8;
            const uint32_t second = rows[2 * j + 1] | (ninth >> (2 * j + 1) & 1) << 8;
            const uint64_t point = kBytes01 + spread3(kGridIq3s[first], kGridIq3s[second]) * 2;  // 1, 3, 5, ... 15
            put_eight(out.q + 8 * j, negate_where(point, b[74 + 2 * g + j]));
        }
        out.scale = load_half(b) * static_cast<float>(1 + 2 * (b[106 + g / 4] >> (g / 2 % 2 * 4) & 15));
        out.min = 0.0f;
    }
};

// Eight values -1, 0, 1, all moved up or down by 1/8: in eighths.
KBITQ_GGUF uint64_t iq1_point(uint32_t row, bool down) {
    // A code 0, 1, 2 times 8, less 8, plus or minus 1. Bytes stay below 128 until 0x80 is taken off each, so that no
    // borrow crosses from one to the next.
    const uint64_t above = spread2(kGridIq1s[row]) * 8 + kBytes01 * (0x80 - 8 - 1) + kBytes01 * (down ? 0 : 2);
    return above ^ kBytes01 * 0x80;
}

struct Iq1S : GgufBlock<19, 256, 50> {  // half d, rows[32], for 32 values upper bits of four rows, a scale, a direction
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        const uint32_t word = load_u16(b + 34 + 2 * (g / 2));
        for (int j = 0; j < 2; ++j) {
            const uint32_t row = b[2 + 2 * g + j] | (word >> 3 * (2 * (g % 2) + j) & 7) << 8;
            put_eight(out.q + 8 * j, iq1_point(row, word >> 15));
        }
        out.scale = load_half(b) * static_cast<float>(2 * (word >> 12 & 7) + 1) * 0.125f;
        out.min = 0.0f;
    }
};

struct Iq1M : GgufBlock<29, 256, 56> {  // rows[32], upper bits and directions[16], scales[8] with d in their top bits
    KBITQ_GGUF void group(GgufGroup& out, const uint8_t* b, int g) {
        for (int j = 0; j < 2; ++j) {
            const uint32_t upper = b[32 + g] >> 4 * j;
            put_eight(out.q + 8 * j, iq1_point(b[2 * g + j] | (upper & 7) << 8, upper >> 3 & 1));
        }
        uint8_t half[2];
        half[0] = static_cast<uint8_t>(b[49] >> 4 | (b[51] & 0xF0));
        half[1] = static_cast<uint8_t>(b[53] >> 4 | (b[55] & 0xF0));
        const uint32_t scale = load_u16(b + 48 + 2 * (g / 4)) >> 3 * (g % 4) & 7;
        out.scale =
            f16_to_float(static_cast<uint16_t>(half[0] | half[1] << 8)) * static_cast<float>(2 * scale + 1) * 0.125f;
        out.min = 0.0f;
    }
};

template <typename... Blocks>
struct GgufBlocks {
    // Calls body with the block of a type; false for a type that has none here.
    template <typename Body>
    static bool with(int type, Body&& body) {
        return ((type == Blocks::kType && (body(Blocks{}), true)) || ...);
    }
};

template <typename Body>
static inline bool with_gguf_block(int type, Body&& body) {
    return GgufBlocks<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K, Iq4Nl, Iq4Xs, Mxfp4, Nvfp4,
                      Tq1_0, Tq2_0, Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S, Iq1S, Iq1M>::with(type, body);
}

}  // namespace
}  // namespace kbitq
