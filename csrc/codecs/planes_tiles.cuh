// From the words of a tile (format/tile_order.h) to registers of an mma operand.
//
// By table: two or four weights at a time from shared memory, in which every lane has its own banks. A row of the table
// holds one entry 32 times. Where the field of an index is a byte (K = 2..4), rows are 256 bytes apart and one byte
// permute makes the whole address [ CTA | 0 | index | lane * size ] (CTA: which one of its cluster); where it is ten
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
// the words are the selectors of a byte permute: no shared memory, but more integer work. The kernels do some subtiles
// one way and some the other, so that neither the shared memory nor the integer units hold up the rest.
//
// Levels are normalised to a largest magnitude in [1, 2); the power of two taken out is multiplied back at the very
// end.
#pragma once

#include "cuda/mma.cuh"
#include "format/tile_order.h"
#include "format/tile_table.h"

namespace kbitq::matmul {

// The shared window of a kernel begins with 1 KB that the system keeps (sm_80 and later); the table comes next, at an
// address known to the compiler but for its highest byte, which is the number of the CTA in its cluster. Kernels check
// it (check_table_base).
constexpr int kTableBase = 1024;
constexpr uint32_t kWindowMask = 0xFF000000u;

__device__ __forceinline__ uint32_t shared_window() {
    extern __shared__ __align__(1024) uint8_t shared[];
    return shared_address(shared) & kWindowMask;
}

template <int K, int Copies = 32>
struct Table : TableSize<K, Copies> {
    using TableSize<K, Copies>::kCopyBytes;
    static __device__ __forceinline__ uint32_t lane_offset() {
        return threadIdx.x % Copies * kCopyBytes | shared_window();
    }
};

__device__ __forceinline__ void check_table_base(const void* dynamic_shared) {
    if ((shared_address(dynamic_shared) & ~kWindowMask) != kTableBase) __trap();
}

// A level for each of the first 2^K lanes. The barrier keeps the load ahead of the copies of weights that follow it:
// the table waits for it, and behind those it would come last.
template <int K>
__device__ __forceinline__ float load_level(const float* codebook) {
    const int lane = threadIdx.x % 32;
    const float level = lane < (1 << K) ? __ldcg(codebook + lane) : 0.0f;
    __syncwarp();
    return level;
}

// The exponent e with 2^e <= largest magnitude < 2^(e+1) of the levels, one in each of the first 2^K lanes. 0 if all
// are zero.
__device__ __forceinline__ int codebook_exponent(float level) {
    uint32_t largest = __float_as_uint(level) & 0x7FFFFFFFu;
#if __CUDA_ARCH__ >= 800
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
#endif
    return largest < 0x00800000u ? 0 : static_cast<int>(largest >> 23) - 127;
}

// 2^e for e in -254..254, as a product of two floats that are normal.
__device__ __forceinline__ float multiply_exp2(float v, int e) {
    const int half = e / 2;
    return v * __int_as_float((127 + half) << 23) * __int_as_float((127 + e - half) << 23);
}

// The level a lane keeps for the table: normalised to a largest magnitude in [2^lift, 2^(lift+1)), as T, in both halves
// of a register. `exponent` is what was taken out.
template <typename T, int K>
__device__ __forceinline__ uint32_t normalised_level(float level, int& exponent, int lift = 0) {
    exponent = codebook_exponent(threadIdx.x % 32 < (1 << K) ? level : 0.0f) - lift;
    const float v = multiply_exp2(level, -exponent);
    return Pair<T>::pack(v, v);
}

// Fills the table; every warp of the block takes part. The caller puts a barrier between this and the first use.
template <int K, int Copies = 32>
__device__ __forceinline__ void fill_table(uint32_t level, int warp, int warps) {
    using Tab = Table<K, Copies>;
    constexpr unsigned kAll = 0xFFFFFFFFu;
    constexpr int kLanesPerRow = Copies * Tab::kCopyBytes / 16;  // that write 16 bytes each
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
    for (int step = warp; step < Tab::kEntries / kRowsPerStep; step += warps) {
        const int entry = step * kRowsPerStep + lane / kLanesPerRow;
        const uint32_t low = pair(entry, entry >> kOddShift), high = Tab::kQuad ? pair(entry >> 2, entry >> 6) : low;
        store_shared_128(shared_window() + kTableBase + entry * Tab::kRowBytes + lane % kLanesPerRow * 16,
                         make_uint4(low, high, low, high));
    }
}

// K = 3: the four pairs whose bits are spread over the three words of a subtile.
__device__ __forceinline__ uint32_t last_pairs(const uint32_t* w) {
    return select_or(w[2] >> 1, 0x44444444u, select_or(w[1] >> 2, 0x22222222u, (w[0] >> 3) & 0x11111111u));
}

// The levels as bytes, in registers: low[0] and high[0] those of levels 0..3, low[1] and high[1] those of levels 4..7.
template <int K>
struct LevelBytes {
    static_assert(K == 2 || K == 3);
    static constexpr int kRegisters = K - 1;
    uint32_t low[2], high[2];

    // From the level that each lane keeps (normalised_level).
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

// As decode_subtile, without shared memory.
template <int K>
__device__ __forceinline__ void decode_subtile_in_registers(const uint32_t* w, const LevelBytes<K>& levels,
                                                            uint32_t (&a)[16]) {
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
// register]. `own` is Table<K, Copies>::lane_offset().
template <int K, int Copies = 32>
__device__ __forceinline__ void decode_subtile(const uint32_t* w, uint32_t own, uint32_t (&a)[16]) {
    const auto four = [&](uint32_t bytes, int first) {  // four pairs, each the index in one byte
        a[first + 0] = load_shared_32<kTableBase>(permute<0x7504>(bytes, own));
        a[first + 1] = load_shared_32<kTableBase>(permute<0x7514>(bytes, own));
        a[first + 2] = load_shared_32<kTableBase>(permute<0x7524>(bytes, own));
        a[first + 3] = load_shared_32<kTableBase>(permute<0x7534>(bytes, own));
    };
    if constexpr (K == 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            load_shared_64<kTableBase>(permute<0x7504>(w[i], own), a[8 * i + 0], a[8 * i + 1]);
            load_shared_64<kTableBase>(permute<0x7514>(w[i], own), a[8 * i + 2], a[8 * i + 3]);
            load_shared_64<kTableBase>(permute<0x7524>(w[i], own), a[8 * i + 4], a[8 * i + 5]);
            load_shared_64<kTableBase>(permute<0x7534>(w[i], own), a[8 * i + 6], a[8 * i + 7]);
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
        constexpr int kLower = Copies == 32 ? 0 : 1;  // an index field begins at bit 7, the address of a row at 7 or 6
        const auto one = [&](uint32_t shifted) {
            return load_shared_32<kTableBase>(select_or(shifted, 0x1FF80u >> kLower, own));
        };
        uint32_t last = own;
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            a[3 * i + 0] = one(w[i] >> kLower);
            a[3 * i + 1] = one(w[i] >> (10 + kLower));
            a[3 * i + 2] = one(__funnelshift_r(w[i], w[i], 20 + kLower));
            last = select_or(w[i] << (2 + 2 * i - kLower), 0x180u >> kLower << (2 * i), last);
        }
        a[15] = load_shared_32<kTableBase>(last);
    }
}

// E4M4 scale bytes as float: an E4M4 byte shifted to a float's exponent is that float, subnormals too, times 2^(bias -
// 127).
constexpr int kScaleShift = 23 - 4;
__device__ __forceinline__ float scale_value(uint32_t word, int byte) {
    const int shift = kScaleShift - 8 * byte;
    const uint32_t placed = (shift >= 0 ? word << shift : word >> -shift) & (0xFFu << kScaleShift);
    return __uint_as_float(placed) * 0x1p116f;
}

// Decodes subtile s of a record one way or the other: in registers the last `InRegisters` of the four.
template <int K, int Copies, int InRegisters>
struct Decoder {
    uint32_t own;
    __device__ __forceinline__ explicit Decoder(uint32_t) : own(Table<K, Copies>::lane_offset()) {}
    __device__ __forceinline__ void operator()(const uint32_t* w, int, uint32_t (&a)[16]) const {
        decode_subtile<K, Copies>(w, own, a);
    }
};

template <int InRegisters>
struct Decoder<2, 32, InRegisters> {
    uint32_t own;
    LevelBytes<2> levels;
    __device__ __forceinline__ explicit Decoder(uint32_t level) : own(Table<2>::lane_offset()), levels(level) {}
    __device__ __forceinline__ void operator()(const uint32_t* w, int s, uint32_t (&a)[16]) const {
        if (s < 4 - InRegisters) return decode_subtile<2>(w, own, a);
        decode_subtile_in_registers<2>(w, levels, a);
    }
};

template <int InRegisters>
struct Decoder<3, 32, InRegisters> {
    uint32_t own;
    LevelBytes<3> levels;
    __device__ __forceinline__ explicit Decoder(uint32_t level) : own(Table<3>::lane_offset()), levels(level) {}
    __device__ __forceinline__ void operator()(const uint32_t* w, int s, uint32_t (&a)[16]) const {
        if (s < 4 - InRegisters) return decode_subtile<3>(w, own, a);
        decode_subtile_in_registers<3>(w, levels, a);
    }
};

// For weights that are scaled before they are multiplied, levels are normalised to 2^kLift, and a scale byte, shifted
// to the place of T's exponent and mantissa, is the scale times 2^kBias: no instruction corrects for the bias of T, and
// the smallest level times the smallest scale is a normal number, or as good as one.
template <typename T>
struct ScalePairs;

template <>
struct ScalePairs<__nv_bfloat16> {
    static constexpr int kShift = 3;
    static constexpr int kBias = 11 - 127;
    static constexpr int kLift = 116;
};
template <>
struct ScalePairs<__half> {
    static constexpr int kShift = 6;
    static constexpr int kBias = 11 - 15;
    static constexpr int kLift = 14;
};

// The scales of rows g (low half) and g + 8 (high half) for a block. `word` is the lane's for blocks 2j and 2j + 1;
// odd: the second of them.
template <typename T>
__device__ __forceinline__ uint32_t scale_pair(uint32_t word, bool odd) {
    constexpr int kShift = ScalePairs<T>::kShift;
    return (odd ? word >> (8 - kShift) : word << kShift) & (0x00FF00FFu << kShift);
}

}  // namespace kbitq::matmul
