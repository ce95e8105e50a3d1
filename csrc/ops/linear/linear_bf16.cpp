// linear for bfloat16 rows of x on processors with AVX512_BF16: a block of W is one vector of 32 bfloat16 levels, and
// one instruction multiplies it by 32 elements of x and adds neighbours in float32.
//
//     K plane words    masks of 32 lanes: index bit j is plane j        K operations
//     indices          one permute of 16-bit levels (K <= 5)            1
//     x * level        vdpbf16ps: 16 sums of two products               1 for each row of x
//     * scale          once, to the block's partial sum                 1 for each row of x
//
// Levels are rounded to bfloat16 (what their scale multiplies is exact), as the GPU's kernels do.
#include <immintrin.h>

#include "cpu/element.h"
#include "ops/codec/kernels.h"
#include "ops/linear/linear_kernels.h"

namespace kbitq {
namespace {

constexpr int kTableLevels = 32;  // of one register

// The 32 levels of a block from its K plane words.
template <int K>
class Lookup {
  public:
    explicit Lookup(const float* codebook) {
        alignas(64) uint16_t levels[kTables * kTableLevels] = {};
        for (int i = 0; i < (1 << K); ++i) levels[i] = float_to_bf16(codebook[i]);
        for (int t = 0; t < kTables; ++t) table_[t] = _mm512_load_si512(levels + t * kTableLevels);
    }
    __m512bh operator()(const uint32_t* words) const {
        __m512i index = _mm512_maskz_set1_epi16(mask(words[0]), 1);
        for (int j = 1; j < (K < 6 ? K : 6); ++j) {
            index = _mm512_mask_add_epi16(index, mask(words[j]), index, _mm512_set1_epi16(static_cast<short>(1 << j)));
        }
        if constexpr (K <= 5) {
            return bh(_mm512_permutexvar_epi16(index, table_[0]));
        } else if constexpr (K == 6) {
            return bh(pick(index, 0));
        } else if constexpr (K == 7) {
            return bh(_mm512_mask_blend_epi16(mask(words[6]), pick(index, 0), pick(index, 2)));
        } else {
            const __m512i low = _mm512_mask_blend_epi16(mask(words[6]), pick(index, 0), pick(index, 2));
            const __m512i high = _mm512_mask_blend_epi16(mask(words[6]), pick(index, 4), pick(index, 6));
            return bh(_mm512_mask_blend_epi16(mask(words[7]), low, high));
        }
    }

  private:
    static constexpr int kTables = K <= 5 ? 1 : 1 << (K - 5);
    static __mmask32 mask(uint32_t word) { return static_cast<__mmask32>(word); }
    static __m512bh bh(__m512i v) { return reinterpret_cast<__m512bh>(v); }
    __m512i pick(__m512i index, int t) const { return _mm512_permutex2var_epi16(table_[t], index, table_[t + 1]); }

    __m512i table_[kTables];
};

// Rows [row, row + R) of W times rows [m, m + B) of x.
template <int K, int R, int B>
inline void tile(const LinearArgs& a, const uint16_t* x, const Lookup<K>& levels, const float* scales, int64_t row,
                 int64_t m) {
    const int64_t nblk = blocks_per_row(a.weight.cols);
    const uint32_t* words[R];
    const uint8_t* bytes[R];
    __m512 acc[R][B];
    for (int r = 0; r < R; ++r) {
        words[r] = a.weight.words + (row + r) * nblk * K;
        bytes[r] = a.weight.scales + (row + r) * nblk;
        for (int b = 0; b < B; ++b) acc[r][b] = _mm512_setzero_ps();
    }
    const uint16_t* xs = x + m * nblk * kBlock;
    for (int64_t block = 0; block < nblk; ++block, xs += kBlock) {
        for (int r = 0; r < R; ++r) {
            const __m512bh level = levels(words[r] + block * K);
            const __m512 scale = _mm512_set1_ps(scales[bytes[r][block]]);
            for (int b = 0; b < B; ++b) {
                const __m512bh xb = reinterpret_cast<__m512bh>(_mm512_loadu_si512(xs + b * nblk * kBlock));
                const __m512 part = _mm512_dpbf16_ps(_mm512_setzero_ps(), level, xb);
                acc[r][b] = _mm512_fmadd_ps(part, scale, acc[r][b]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        const float bias = a.bias ? read_element(a.bias, a.dtype, row + r) : 0.0f;
        for (int b = 0; b < B; ++b) {
            write_element(a.y, a.dtype, (m + b) * a.weight.rows + row + r, _mm512_reduce_add_ps(acc[r][b]) + bias);
        }
    }
}

template <int K, int R, int B>
inline void rows(const LinearArgs& a, const uint16_t* x, const Lookup<K>& levels, int64_t begin, int64_t end,
                 int64_t m) {
    const float* scales = scale_table();
    int64_t row = begin;
    for (; row + R <= end; row += R) tile<K, R, B>(a, x, levels, scales, row, m);
    for (; row < end; ++row) tile<K, 1, B>(a, x, levels, scales, row, m);
}

template <int K>
void linear_k(const LinearArgs& a, const uint16_t* x, int64_t begin, int64_t end) {
    const int64_t group = a.weight.rows / a.weight.groups;
    while (begin < end) {  // one codebook at a time
        const int64_t g = begin / group;
        const int64_t stop = (g + 1) * group < end ? (g + 1) * group : end;
        const Lookup<K> levels(a.weight.codebook + (g << K));
        int64_t m = 0;
        for (; m + 8 <= a.batch; m += 8) rows<K, 2, 8>(a, x, levels, begin, stop, m);
        for (; m + 4 <= a.batch; m += 4) rows<K, 4, 4>(a, x, levels, begin, stop, m);
        for (; m + 2 <= a.batch; m += 2) rows<K, 4, 2>(a, x, levels, begin, stop, m);
        for (; m < a.batch; ++m) rows<K, 4, 1>(a, x, levels, begin, stop, m);
        begin = stop;
    }
}

void linear(const LinearArgs& a, const uint16_t* x, int64_t begin, int64_t end) {
    with_bits(a.weight.k, [&](auto bits) { linear_k<bits>(a, x, begin, end); });
}

}  // namespace

const Bf16Linear kAvx512Bf16Linear = linear;

}  // namespace kbitq
