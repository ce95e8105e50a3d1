// Which level is nearest, on the GPU: the tables of a quantize call in shared memory, and the ways to use them. All
// give format.md's index (the number of thresholds mid[j] * s below v, ties to the lower level) and so the same bits.
//
// CellSearch       v / s, only roughly computed, falls into one of N equal cells of [-1, 1], each of which holds one
//                  threshold at most (with a margin for the roughness): one lookup tells how many lie below the cell,
//                  one exact comparison settles the last. The cost is the same for every K. N = 2^(K+1) words are one
//                  row of shared-memory banks up to K = 4 and two at K = 5.
// RegisterSearch   K = 2: all three thresholds in registers, any codebook.
// Magnitudes       the error of a candidate scale at K <= 3, for a codebook symmetric about zero: magnitudes against
//                  half the thresholds and levels, in registers.
// BisectSearch     any codebook (equal levels, thresholds closer than a cell): K comparisons.
#pragma once

#include <cstddef>

#include "cuda/ptx.cuh"
#include "cuda/tree.cuh"
#include "format/codebook.h"
#include "format/scale_e4m4.h"
#include "ops/codec/quantize.h"

namespace kbitq {
namespace {

KBITQ_HD constexpr int fewest_cells(int k) { return k <= 4 ? 32 : 2 << k; }
KBITQ_HD constexpr int most_cells(int k) { return fewest_cells(k) * (k <= 5 ? 4 : 2); }

// The shared memory of a CTA begins with 1 KiB of the system's own, which is as much alignment as a variable can have.
constexpr int kMostSharedAlignment = 1024;

// The tables of a grid of N cells, one word a cell. Where they can begin at a multiple of their size, the offset of a
// cell is joined to the address by the instruction that masks it.
template <int K>
struct alignas(4 * most_cells(K) <= kMostSharedAlignment ? 4 * most_cells(K) : 16) CellTables {
    static constexpr int kMost = most_cells(K);
    static constexpr bool kJoined = 4 * kMost <= kMostSharedAlignment;
    static constexpr bool kWithLevels = K <= 5;  // beyond, the levels by cell would leave no room for the data

    float mid[kMost];                                           // the threshold in the cell, +inf if there is none
    uint32_t below[kMost];                                      // thresholds below the cell
    float level[kWithLevels ? 2 : 1][kWithLevels ? kMost : 1];  // of a v that is not above mid, and of one that is
};

template <int K>
struct SearchTables {
    static constexpr int kLevels = 1 << K;
    static constexpr bool kInRegisters = K == 2;

    CellTables<K> cell;
    float level[kLevels];
    float mid[kLevels];  // the last one is not used
    float to_blocks;     // 2^-x
    int top;             // the largest byte that may be chosen
    uint32_t zero;       // the index of an exact zero
    int cells;           // N, or 0: no N separates the thresholds
    bool symmetric;      // levels are mirrored about zero, with no threshold but the middle one near it
};

// A cell as a byte offset into its tables: clamp(v / 2s + 1/2) * (4N - 4) rounded to an integer in the low bits of a
// float, of which the lowest two are dropped. So cell k holds 4k - 1/2 .. 4k + 7/2 of that scale.
constexpr float kIntegerInLowBits = 0x1p23f;

// Bounds of v / s in cell k of n, with a margin some hundred times the error of the rough division.
__device__ __forceinline__ float cell_bound(int k, int n, float quarter) {
    if (k == 0 && quarter < 0) return -INFINITY;
    if (k == n - 1 && quarter > 0) return INFINITY;
    const float margin = quarter < 0 ? -0x1p-15f : 0x1p-15f;
    return 2.0f * ((4.0f * k + quarter) / (4.0f * n - 4.0f) - 0.5f) + margin;
}

// Fills this thread's cells for a grid of n; false if one of them holds two thresholds.
template <int K>
__device__ __forceinline__ bool fill_cells(SearchTables<K>& t, int n) {
    bool separate = true;
    for (int k = threadIdx.x; k < n; k += blockDim.x) {
        const int below = nearest_index<K>(t.mid, cell_bound(k, n, -0.5f), 1.0f);
        const int upto = nearest_index<K>(t.mid, cell_bound(k, n, 3.5f), 1.0f);
        separate = separate && upto - below <= 1;
        t.cell.below[k] = below;
        t.cell.mid[k] = upto > below ? t.mid[below] : INFINITY;
        if constexpr (CellTables<K>::kWithLevels) {
            t.cell.level[0][k] = t.level[below];
            t.cell.level[1][k] = t.level[upto];
        }
    }
    return separate;
}

// The least N that separates the thresholds, its tables filled; 0 if there is none. Every thread of the CTA.
template <int K>
__device__ __forceinline__ int build_cells(SearchTables<K>& t) {
    if constexpr (SearchTables<K>::kInRegisters) return 0;
    if (CellTables<K>::kJoined && shared_address(&t.cell) % (4 * most_cells(K)) != 0) return 0;
    int cells = fewest_cells(K);
    while (cells <= most_cells(K) && __syncthreads_or(!fill_cells(t, cells))) cells *= 2;
    return cells <= most_cells(K) ? cells : 0;
}

template <int K>
__device__ __forceinline__ bool is_symmetric(const SearchTables<K>& t) {
    constexpr int kHalf = SearchTables<K>::kLevels / 2;
    bool symmetric = t.level[kHalf] >= 0.0f;
    for (int i = 0; i < kHalf; ++i) symmetric = symmetric && t.level[kHalf + i] == -t.level[kHalf - 1 - i];
    for (int i = kHalf; i + 1 < 2 * kHalf; ++i) symmetric = symmetric && t.mid[i] > 0x1p-64f;
    return symmetric;
}

// Every thread of the CTA; ends with a barrier.
template <int K>
__device__ __forceinline__ void build_tables(SearchTables<K>& t, const QuantizeArgs& a) {
    constexpr int n = SearchTables<K>::kLevels;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        t.level[i] = a.levels[i];
        if (i + 1 < n) t.mid[i] = level_midpoint(a.levels[i], a.levels[i + 1]);
    }
    __syncthreads();
    const int x = a.amax ? tensor_exponent(*a.amax) : 0;
    if (threadIdx.x == 0) {
        t.to_blocks = exp2_int(-x);
        t.top = a.amax ? static_cast<int>(top_byte(x, a.dtype)) : kScaleBytes - 1;
        t.symmetric = K <= 3 && is_symmetric(t);
    }
    if (threadIdx.x == 32) {
        int zero = 0;  // = zero_index(t.mid, n), in K steps
        for (int bit = n / 2; bit > 0; bit /= 2) zero += 0.0f > t.mid[zero + bit - 1] ? bit : 0;
        t.zero = zero;
    }
    if (a.packed.codebook && blockIdx.x == 0) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) a.packed.codebook[i] = t.level[i] * exp2_int(x);
    }
    const int cells = build_cells(t);
    if (threadIdx.x == 0) t.cells = cells;
    __syncthreads();
}

template <int K>
class CellSearch {
  public:
    __device__ __forceinline__ CellSearch(const SearchTables<K>& tables, float scale)
        : t_(tables), scale_(scale), half_inverse_(0.5f * approximate_reciprocal(scale)) {
        mask_ = 4 * tables.cells - 4;
        base_ = shared_address(&tables.cell);
        span_ = static_cast<float>(mask_);
    }

    // Scales whose reciprocal the rough division can use.
    __device__ __forceinline__ static bool serves(float scale) { return scale > 0x1p-120f && scale < 0x1p120f; }

    // v - level * scale
    __device__ __forceinline__ float difference(float v) const {
        uint32_t cell = address(v);
        const float threshold = __uint_as_float(load_shared<0>(cell)) * scale_;
        if constexpr (CellTables<K>::kWithLevels) {
            advance_if_above<kTableBytes>(cell, v, threshold);
            return v - __uint_as_float(load_shared<2 * kTableBytes>(cell)) * scale_;
        } else {
            return v - t_.level[load_shared<kTableBytes>(cell) + (v > threshold)] * scale_;
        }
    }

    // Adds the index, shifted left, to sum.
    template <int shift>
    __device__ __forceinline__ void add_index(uint32_t& sum, float v) const {
        const uint32_t cell = address(v);
        const float threshold = __uint_as_float(load_shared<0>(cell)) * scale_;
        sum += load_shared<kTableBytes>(cell) << shift;
        advance_if_above<1u << shift>(sum, v, threshold);
    }

  private:
    static constexpr uint32_t kTableBytes = 4 * most_cells(K);
    static_assert(offsetof(CellTables<K>, below) == kTableBytes && offsetof(CellTables<K>, level) == 2 * kTableBytes);

    __device__ __forceinline__ uint32_t address(float v) const {
        const float place = saturating_fma(v, half_inverse_, 0.5f);
        const uint32_t offset = float_bits(__fmaf_rn(place, span_, kIntegerInLowBits)) & mask_;
        return CellTables<K>::kJoined ? offset | base_ : offset + base_;
    }

    const SearchTables<K>& t_;
    float scale_, half_inverse_, span_;
    uint32_t mask_, base_;
};

class RegisterSearch {
  public:
    __device__ __forceinline__ RegisterSearch(const SearchTables<2>& t, float scale) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            level_[j] = t.level[j] * scale;
            if (j < 3) threshold_[j] = t.mid[j] * scale;
        }
    }

    __device__ __forceinline__ float difference(float v) const {
        float d = v - level_[0];
#pragma unroll
        for (int j = 0; j < 3; ++j) subtract_if_above(d, v, threshold_[j], v, level_[j + 1]);
        return d;
    }

    template <int shift>
    __device__ __forceinline__ void add_index(uint32_t& sum, float v) const {
        add_two_bits<shift>(sum, v, threshold_[0], threshold_[1], threshold_[2]);
    }

  private:
    float level_[4], threshold_[3];
};

template <int K>
class BisectSearch {
  public:
    __device__ __forceinline__ BisectSearch(const SearchTables<K>& tables, float scale) : t_(tables), scale_(scale) {}

    __device__ __forceinline__ float difference(float v) const {
        return v - t_.level[nearest_index<K>(t_.mid, v, scale_)] * scale_;
    }

    template <int shift>
    __device__ __forceinline__ void add_index(uint32_t& sum, float v) const {
        sum += static_cast<uint32_t>(nearest_index<K>(t_.mid, v, scale_)) << shift;
    }

  private:
    const SearchTables<K>& t_;
    float scale_;
};

template <bool kWeighted, typename Search>
__device__ __forceinline__ float error_of(const Search& search, const float (&v)[kBlock],
                                          const float (&weight)[kBlock]) {
    return tree_sum([&](int i) {
        const float t = search.difference(v[i]);
        return kWeighted ? (t * t) * weight[i] : t * t;
    });
}

// Magnitudes of a block against the non-negative half of a symmetric codebook. A tie of a negative value goes to the
// lower level, which is the larger magnitude: its magnitude is nudged to the next float for the comparisons.
template <int K>
struct Magnitudes {
    static constexpr int kHalf = 1 << (K - 1);
    float m[kBlock], nudged[kBlock];

    __device__ __forceinline__ explicit Magnitudes(const float (&v)[kBlock]) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            m[i] = fabsf(v[i]);
            nudged[i] = bits_float(float_bits(m[i]) + (float_bits(v[i]) >> 31));
            keep(nudged[i]);
        }
    }

    __device__ __forceinline__ float error_of(const SearchTables<K>& t, float s) const {
        float threshold[kHalf], level[kHalf];  // threshold[j]: between level j - 1 and j
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
            level[j] = t.level[kHalf + j] * s;
            threshold[j] = t.mid[kHalf - 1 + j] * s;
        }
        return tree_sum([&](int i) {
            float d = m[i] - level[0];
#pragma unroll
            for (int j = 1; j < kHalf; ++j) subtract_if_above(d, nudged[i], threshold[j], m[i], level[j]);
            return d * d;
        });
    }
};

}  // namespace
}  // namespace kbitq
