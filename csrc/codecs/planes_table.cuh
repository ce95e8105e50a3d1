// From the words of planes in tile order (codecs/planes_tiles.h) to registers of an mma operand.
//
// By table: two or four weights at a time from shared memory, in which every lane has its own banks. A row of the table
// holds one entry 32 times. Where the field of an index is a byte (K = 2..4), rows are 256 bytes apart and one byte
// permute makes the whole address [ CTA | 0 | index | lane * size ] (CTA: its number in the cluster); where it is ten
// bits (K = 5), rows are 128 bytes.
//
//     K = 2   four weights, 8 bytes    256 rows    64 KB
//     K = 3   two weights,  4 bytes    120 rows    30 KB, half used
//     K = 4   two weights,  4 bytes    256 rows    64 KB, half used
//     K = 5   two weights,  4 bytes   1024 rows   128 KB
//
// K = 5 can also do with 16 copies of an entry (64 KB), two lanes sharing banks, where other things need the memory.
//
// In registers (K = 2, 3): the high bytes of all levels are one or two registers, the low bytes too, and half bytes of
// the words are the selectors of a byte permute: no shared memory, but more integer work. A kernel may do some subtiles
// one way and some the other, so that neither the shared memory nor the integer units hold up the rest.
#pragma once

#include "codecs/planes_tiles.h"
#include "cuda/mma.cuh"
#include "cuda/shared_base.cuh"

namespace kbitq::tiled {

// What a lane adds to an index to get the address of its own copy of the entry.
template <class Table>
__device__ __forceinline__ uint32_t own_copy() {
    return threadIdx.x % Table::kCopies * Table::kCopyBytes | shared_window();
}

// Fills the table, at the start of the shared memory; every warp of the block takes part. `level`: normalised_level.
// The caller puts a barrier between this and the first use.
template <class Table>
__device__ __forceinline__ void fill_table(uint32_t level, int warp, int warps) {
    constexpr int K = Table::kBits;
    constexpr unsigned kAll = 0xFFFFFFFFu;
    constexpr int kLanesPerRow = Table::kCopies * Table::kCopyBytes / 16;  // that write 16 bytes each
    constexpr int kRowsPerStep = 32 / kLanesPerRow;
    const int lane = threadIdx.x % 32;
    const auto at = [&](int i) { return __shfl_sync(kAll, level, i & ((1 << K) - 1)); };
    // K = 2: the four levels in two registers, from which a byte permute takes any pair
    const uint32_t low_two = permute<0x5410>(at(0), at(1)), high_two = permute<0x5410>(at(2), at(3));
    const auto pair = [&](int even, int odd) {
        if (K != 2) return permute<0x5410>(at(even), at(odd));
        return permute(low_two, high_two, 0x1010 + (even & 3) * 0x22 + (odd & 3) * 0x2200);
    };
    constexpr int kOddShift = K == 5 ? 5 : 4;
#pragma unroll 4
    for (int step = warp; step < Table::kEntries / kRowsPerStep; step += warps) {
        const int entry = step * kRowsPerStep + lane / kLanesPerRow;
        const uint32_t low = pair(entry, entry >> kOddShift), high = Table::kQuad ? pair(entry >> 2, entry >> 6) : low;
        store_shared_128(shared_window() + kSharedBase + entry * Table::kRowBytes + lane % kLanesPerRow * 16,
                         make_uint4(low, high, low, high));
    }
}

// K = 3: the four pairs whose bits are spread over the three words of a subtile.
__device__ __forceinline__ uint32_t last_pairs(const uint32_t* w) {
    return select_or(w[2] >> 1, 0x44444444u, select_or(w[1] >> 2, 0x22222222u, (w[0] >> 3) & 0x11111111u));
}

// The levels as bytes, in registers: low[0] and high[0] hold those of levels 0..3, low[1] and high[1] of levels 4..7.
// Not Used: nothing, for kernels that decode by the table alone.
template <int K, bool Used = true>
struct LevelBytes {
    static_assert(K == 2 || K == 3);
    static constexpr int kRegisters = K - 1;
    uint32_t low[2], high[2];

    // `level`: normalised_level.
    __device__ __forceinline__ explicit LevelBytes(uint32_t level) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const auto at = [&](int i) { return __shfl_sync(0xFFFFFFFFu, level, r < kRegisters ? 4 * r + i : 0); };
            const uint32_t two = permute<0x5410>(at(0), at(1)), other = permute<0x5410>(at(2), at(3));
            low[r] = permute<0x6420>(two, other);
            high[r] = permute<0x7531>(two, other);
        }
    }
    // Four weights, selected by the low four half bytes of `selectors`, as two pairs.
    __device__ __forceinline__ void decode(uint32_t selectors, uint32_t& first, uint32_t& second) const {
        const uint32_t l = permute(low[0], low[1], selectors), h = permute(high[0], high[1], selectors);
        first = permute<0x5140>(l, h);
        second = permute<0x7362>(l, h);
    }
};
template <int K>
struct LevelBytes<K, false> {
    __device__ __forceinline__ explicit LevelBytes(uint32_t) {}
};

// As decode_by_table, without shared memory.
template <int K>
__device__ __forceinline__ void decode_by_permutes(const uint32_t* w, const LevelBytes<K>& levels, uint32_t (&a)[16]) {
    if constexpr (K == 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                const uint32_t s = (w[i] >> (2 * f)) & 0x33333333u;
                levels.decode(s, a[8 * i + f], a[8 * i + f + 2]);
                levels.decode(s >> 16, a[8 * i + f + 4], a[8 * i + f + 6]);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t s = i < 3 ? w[i] & 0x77777777u : last_pairs(w);
            levels.decode(s, a[4 * i], a[4 * i + 1]);
            levels.decode(s >> 16, a[4 * i + 2], a[4 * i + 3]);
        }
    }
}

// The 32 weights of a lane in a subtile of 64 columns: K words to the a-operands of four k-steps, a[4 * step +
// register]. `own`: own_copy().
template <class Table>
__device__ __forceinline__ void decode_by_table(const uint32_t* w, uint32_t own, uint32_t (&a)[16]) {
    constexpr int K = Table::kBits;
    const auto four = [&](uint32_t bytes, int first) {  // four pairs, each the index in one byte
        a[first + 0] = load_shared<kSharedBase>(permute<0x7504>(bytes, own));
        a[first + 1] = load_shared<kSharedBase>(permute<0x7514>(bytes, own));
        a[first + 2] = load_shared<kSharedBase>(permute<0x7524>(bytes, own));
        a[first + 3] = load_shared<kSharedBase>(permute<0x7534>(bytes, own));
    };
    if constexpr (K == 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            load_shared_64<kSharedBase>(permute<0x7504>(w[i], own), a[8 * i + 0], a[8 * i + 1]);
            load_shared_64<kSharedBase>(permute<0x7514>(w[i], own), a[8 * i + 2], a[8 * i + 3]);
            load_shared_64<kSharedBase>(permute<0x7524>(w[i], own), a[8 * i + 4], a[8 * i + 5]);
            load_shared_64<kSharedBase>(permute<0x7534>(w[i], own), a[8 * i + 6], a[8 * i + 7]);
        }
    } else if constexpr (K == 3) {
#pragma unroll
        for (int i = 0; i < 3; ++i) four(w[i] & 0x77777777u, 4 * i);
        four(last_pairs(w), 12);
    } else if constexpr (K == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) four(w[i], 4 * i);
    } else {
        static_assert(K == 5);
        constexpr int kLower =
            Table::kCopies == 32 ? 0 : 1;  // an index field begins at bit 7, the address of a row at 7 or 6
        const auto one = [&](uint32_t shifted) {
            return load_shared<kSharedBase>(select_or(shifted, 0x1FF80u >> kLower, own));
        };
        uint32_t last = own;
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            a[3 * i + 0] = one(w[i] >> kLower);
            a[3 * i + 1] = one(w[i] >> (10 + kLower));
            a[3 * i + 2] = one(__funnelshift_r(w[i], w[i], 20 + kLower));
            last = select_or(w[i] << (2 + 2 * i - kLower), 0x180u >> kLower << (2 * i), last);
        }
        a[15] = load_shared<kSharedBase>(last);
    }
}

}  // namespace kbitq::tiled
