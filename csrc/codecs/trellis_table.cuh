// From the words of a block in tile order (codecs/trellis_tiles.h) to registers of an mma operand, by a table in shared
// memory in which every lane has its own bank.
//
//     K = 1, 2   two weights   256 rows of 256 bytes, half used     64 KB    address [ CTA | 0 | index | lane * 4 ]
//     K = 3      two weights   1024 rows of 128 bytes              128 KB            [ CTA | 0..0 odd | index | even |
//     lane * 4 ]
//                              or of 64, two lanes sharing banks    64 KB            [ CTA | 0 | index | odd even |
//                              lane * 4 ]
//     K = 4      one weight    256 rows of 256 bytes                64 KB    as K = 1, 2
//
// CTA: its number in the cluster. even, odd: bits 4 of the two indices. At K = 4 two bits of an index say nothing, so a
// row is there four times; its first half is for weights that go to the low half of a register, its second for others,
// with zeros beside them: adding two joins them, and that the floating-point units do, which have time.
#pragma once

#include "codecs/trellis_tiles.h"
#include "cuda/mma.cuh"
#include "cuda/shared_base.cuh"

namespace kbitq::tiled {

// What a lane adds to an index to get the address of its own copy of the entry.
template <class Table>
__device__ __forceinline__ uint32_t own_trellis_copy() {
    const uint32_t place = threadIdx.x % Table::kCopies * 4;
    if constexpr (Table::kBits != 3) return place | shared_window();
    return place << 16 | place | (Table::kCopies == 16 ? shared_window() : 0);
}

// The indices of the two weights of a row of the table; of its one weight, at K = 4, the first.
struct EntryIndices {
    int even, odd;
};
template <class Table>
__device__ __forceinline__ EntryIndices entry_indices(int row) {
    constexpr int K = Table::kBits;
    const auto parity = [](int bits) { return __popc(bits) & 1; };
    if constexpr (K == 1) {  // the bits p[i-5 .. i+2]
        return {row >> 5 & 1 | parity(row & 0x05) << 1 | parity(row & 0x5B) << 2,
                row >> 6 & 1 | parity(row & 0x0A) << 1 | parity(row & 0xB6) << 2};
    } else if constexpr (K <= 3) {
        const int z = K == 2 ? row : Table::kCopies == 32 ? row >> 1 & 0xFF : row >> 2;
        const int even = K == 2 ? 0 : row & 1, odd = K == 2 ? 0 : Table::kCopies == 32 ? row >> 9 : row >> 1 & 1;
        return {z >> 5 & 1 | (z & 1) << 1 | parity(z & 0x67) << 2 | (z >> 4 & 1) << 3 | even << 4,
                z >> 6 & 1 | parity(z & 0x22) << 1 | parity(z & 0x2E) << 2 | (z >> 7 & 1) << 3 | odd << 4};
    } else {
        return {row & 63, row & 63};
    }
}

// A level that normalise_trellis has kept, in the low half.
template <class Table>
__device__ __forceinline__ uint32_t kept_level(uint32_t kept, int index) {
    const uint32_t v = __shfl_sync(0xFFFFFFFFu, kept, index & 31);
    return Table::kLevels > 32 && index >= 32 ? v >> 16 : v & 0xFFFFu;
}

// Fills the table, at the start of the shared memory; every warp of the block takes part. `kept`: levels `lane` and, in
// the high half, `lane` + 32. The caller puts a barrier between this and the first use.
template <class Table>
__device__ __forceinline__ void fill_trellis_table(uint32_t kept, int warp, int warps) {
    constexpr int K = Table::kBits;
    constexpr int kLanesPerRow = K == 4 ? 16 : Table::kCopies / 4;  // that write 16 bytes each
    constexpr int kRowsPerStep = 32 / kLanesPerRow;
    constexpr int kRowsAtOnce = Table::kEntries >= 512 ? 32 : 16;  // a lane makes the entry of one
    const int lane = threadIdx.x % 32;
    const uint32_t to =
        shared_window() + kSharedBase + lane / kLanesPerRow * Table::kRowBytes + lane % kLanesPerRow * 16;
#pragma unroll 1
    for (int first = warp * kRowsAtOnce; first < Table::kEntries; first += warps * kRowsAtOnce) {
        const EntryIndices indices = entry_indices<Table>(first + lane % kRowsAtOnce);
        uint32_t own = kept_level<Table>(kept, indices.even);
        if constexpr (K != 4) own |= kept_level<Table>(kept, indices.odd) << 16;
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; row += kRowsPerStep) {
            uint32_t entry = __shfl_sync(0xFFFFFFFFu, own, row + lane / kLanesPerRow);
            if (K == 4 && lane % kLanesPerRow >= kLanesPerRow / 2) entry <<= 16;
            store_shared_128(to + (first + row) * Table::kRowBytes, make_uint4(entry, entry, entry, entry));
        }
    }
}

__device__ __forceinline__ uint32_t turn_right(uint32_t x, int by) { return __funnelshift_r(x, x, by); }

// A mask that has a pattern of 8 bits four times, or of 4 bits eight times, turned left; `by` may be 0.
template <uint32_t Mask>
__device__ __forceinline__ uint32_t repeated(int by) {
    return Mask << by | (by ? Mask >> (32 - by) : 0);
}

// K <= 3: bytes[j], byte m: what says the classes of the pair i = 8m + 2j, and its bits u (codecs/trellis_tiles.h).
template <int K>
__device__ __forceinline__ void pair_bytes(const uint32_t* w, uint32_t (&bytes)[4]) {
    const uint32_t q = w[0];
    if constexpr (K == 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) bytes[j] = turn_right(q, 2 * j);
    } else {
        const uint32_t x = q ^ turn_right(q, 2) ^ (turn_right(q, 4) & kOddBits);
        // The upper half of a byte, u q q u, for every other pair.
        const uint32_t upper[2] = {select(q, w[1], 0x66666666u), select(w[1], q, 0x66666666u)};
#pragma unroll
        for (int j = 0; j < 4; ++j) bytes[j] = turn_right(select(x, upper[j % 2], repeated<0x0F0F0F0Fu>(2 * j)), 2 * j);
    }
}

// K = 3: the address of the entry of pair m = 2 * half + odd of `bytes`, from `upper`: what upper_bits made.
template <class Table>
__device__ __forceinline__ uint32_t pair_address(uint32_t bytes, uint32_t upper, int half, int odd) {
    const int m = 2 * half + odd;
    if constexpr (Table::kCopies == 32)
        return permute(bytes, upper, (odd ? 0xF706 : 0xD504) + 16 * m) + shared_window();
    return permute(bytes, upper, (odd ? 0x7506 : 0x7504) + 16 * m);
}

// K = 3: bits 4 of the pairs 8m + 2j with m = 2 * half and 2 * half + 1, each beside the lane's place in the table.
template <class Table>
__device__ __forceinline__ uint32_t upper_bits(uint32_t w, int j, int half, uint32_t own) {
    constexpr int kLower = Table::kCopies == 32 ? 0 : 1;  // an address has them at bit 7, or 6
    const int left = (half ? -2 * (j + 1) : 2 * j) - kLower;
    const uint32_t moved = half && j == 3 ? turn_right(w, -left) : left >= 0 ? w << left : w >> -left;
    return (moved & (Table::kCopies == 32 ? 0x01800180u : 0x00C000C0u)) | own;
}

// K = 4: bytes[j], byte (m + (j + 5) / 8) % 4: the index of element i = 8m + j, and two bits that say nothing.
__device__ __forceinline__ void element_bytes(const uint32_t* w, uint32_t (&bytes)[8]) {
    const uint32_t q = w[0], bit_1 = turn_right(q, 28) ^ turn_right(q, 26);
    const uint32_t bit_2 = turn_right(bit_1, 3) ^ bit_1 ^ turn_right(q, 25);
    const uint32_t low[2] = {select(q, bit_1, kEvenBits), select(bit_1, q, kEvenBits)};
    const uint32_t high[2] = {select(bit_2, w[1], kEvenBits), select(w[1], bit_2, kEvenBits)};
    uint32_t four[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) four[r] = select(low[r % 2], high[r % 2], repeated<0x33333333u>(r));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int r = (j + kTilePathTurn) % 8;
        bytes[j] = turn_right(select(four[r % 4], w[2 + j % 2], repeated<0x0F0F0F0Fu>(r)), r);
    }
}

// The address of the entry whose index is byte `byte` of a word: on the integer units, or on the floating-point units,
// which have time where no weights are scaled.
template <class Table>
__device__ __forceinline__ uint32_t byte_address(uint32_t bytes, int byte, uint32_t own, bool odd) {
    return Table::kProducts && odd ? byte_times_256(bytes, byte, own) : permute(bytes, own, 0x7504 + 16 * byte);
}

// The four registers of row g (half 0) or g + 8 of unit `unit` of a block (eight neighbours), at a[0], a[2], a[4],
// a[6]. `w`: the block's words.
template <typename T, class Table>
__device__ __forceinline__ void decode_unit(const uint32_t* w, int unit, uint32_t own, uint32_t* a) {
    constexpr int K = Table::kBits;
    const int half = unit / 2, odd = unit % 2;
    if constexpr (K == 4) {
        uint32_t bytes[8];
        element_bytes(w, bytes);
        const auto at = [&](int j) {
            return byte_address<Table>(bytes[j], (unit + (j + kTilePathTurn) / 8) % 4, own, j % 2);
        };
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t low = load_shared<kSharedBase>(at(2 * j)),
                           high = load_shared<kSharedBase + 128>(at(2 * j + 1));
            a[2 * j] = Pair<T>::add(low, high);
        }
    } else {
        uint32_t bytes[4];
        pair_bytes<K>(w, bytes);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if constexpr (K == 3) {
                const uint32_t upper = upper_bits<Table>(w[2], j, half, own);
                a[2 * j] = load_shared<kSharedBase>(pair_address<Table>(bytes[j], upper, half, odd));
            } else {
                a[2 * j] = load_shared<kSharedBase>(byte_address<Table>(bytes[j], unit, own, j % 2));
            }
        }
    }
}

}  // namespace kbitq::tiled
