// linear of NF4 for bfloat16 rows of x on processors with AMX. Sixteen rows of W are decoded, a block at a time, to a
// tile of levels [16 rows, 32 columns] of bfloat16, which one instruction multiplies by up to sixteen rows of x; what a
// block adds up to is scaled in float32. Levels are rounded to bfloat16, what their scale multiplies is exact.
#include "cpu/element.h"
#include "cpu/simd_avx512.h"
#include "format/nf4.h"
#include "ops/nf4/nf4_kernels.h"

namespace kbitq {
namespace {

using namespace avx512;

constexpr int kSide = 16;              // rows of W, or of x, that a tile has
constexpr int kTileCols = 32;          // columns of W in a tile
constexpr int kPairs = 2 * kTileCols;  // columns whose codes are 32 bytes: a tile of those at even places, one of odd

// GCC does not know what the tile instructions read: everything is in memory before them.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

// What the tile registers are, as LDTILECFG reads it.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 and 1: sums [rows of W, rows of x]; 2 and 3: levels at even and odd places; 4 and 5: x beside them, where
// element [j, m] is a pair of columns of row m.
void configure(int batch) {
    TileConfig config;
    for (int tile = 0; tile < 6; ++tile) {
        config.rows[tile] = kSide;
        config.row_bytes[tile] = static_cast<uint16_t>(tile == 2 || tile == 3 ? 2 * kTileCols : 4 * batch);
    }
    settle_memory();
    _tile_loadconfig(&config);
}

struct alignas(64) Levels {
    uint16_t even[kSide][kTileCols], odd[kSide][kTileCols];
};

// The levels of kPairs columns of `rows` rows, whose codes are `stride` bytes apart.
inline void decode(const uint8_t* codes, int64_t stride, int rows, __m512i table, Levels& out) {
    for (int r = 0; r < rows; ++r) {
        const uint8_t* of_row = codes + r * stride;
        const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(of_row)));
        _mm512_store_si512(out.even[r], _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), table));
        _mm512_store_si512(out.odd[r], _mm512_permutexvar_epi16(pairs, table));
        _mm_prefetch(reinterpret_cast<const char*>(of_row + kSide * stride), _MM_HINT_T0);  // of the rows that follow
    }
}

// Adds to tile Sum the products of kPairs columns.
template <int Sum>
inline void add_products(const Levels& levels, const uint32_t* x, int batch) {
    settle_memory();
    _tile_loadd(2, levels.even, sizeof levels.even[0]);
    _tile_loadd(3, levels.odd, sizeof levels.odd[0]);
    _tile_loadd(4, x, 4 * batch);
    _tile_loadd(5, x + kSide * batch, 4 * batch);
    if constexpr (Sum == 0) {  // the number of a tile is a literal
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(0, 3, 5);
    } else {
        _tile_dpbf16ps(1, 2, 4);
        _tile_dpbf16ps(1, 3, 5);
    }
}

// A group of rows of W by `batch` rows of x, the first of which is `first`; x is their part of what arrange wrote.
struct Product {
    const Nf4LinearArgs& a;
    const uint32_t* x;
    int64_t row, first;
    int rows, batch;
    __m512i table;
    int64_t blocks = a.cols / a.block, stride = a.cols / 2;
    Levels levels[2] = {};
    alignas(64) float sums[kSide][kSide] = {};

    void decode_at(int64_t column) {
        decode(a.codes + row * stride + column / 2, stride, rows, table, levels[column / kPairs % 2]);
    }

    // Block b to tile Sum, while what follows is decoded: a tile is read long after its levels were written.
    template <int Sum>
    void add_block(int64_t b) {
        if constexpr (Sum == 0) {
            _tile_zero(0);
        } else {
            _tile_zero(1);
        }
        for (int64_t column = b * a.block; column < (b + 1) * a.block; column += kPairs) {
            if (column + kPairs < a.cols) decode_at(column + kPairs);
            add_products<Sum>(levels[column / kPairs % 2], x + column / 2 * batch, batch);
        }
    }

    template <int Sum>
    inline void scale_block(int64_t b, F (&total)[kSide]) {
        if constexpr (Sum == 0) {
            _tile_stored(0, sums, sizeof sums[0]);
        } else {
            _tile_stored(1, sums, sizeof sums[0]);
        }
        for (int r = 0; r < kSide; ++r)
            total[r] = fused(load(sums[r]), splat(a.scales[(row + (r < rows ? r : 0)) * blocks + b]), total[r]);
    }

    void run() {
        F total[kSide];
        for (F& t : total) t = splat(0.0f);
        decode_at(0);
        add_block<0>(0);
        for (int64_t b = 1; b < blocks; ++b) {
            if (b % 2) {
                add_block<1>(b);
                scale_block<0>(b - 1, total);
            } else {
                add_block<0>(b);
                scale_block<1>(b - 1, total);
            }
        }
        if (blocks % 2) {
            scale_block<0>(blocks - 1, total);
        } else {
            scale_block<1>(blocks - 1, total);
        }
        write(total);
    }

    void write(const F (&total)[kSide]) const {
        for (int r = 0; r < rows; ++r) {
            const float bias = a.bias ? read_element(a.bias, a.dtype, row + r) : 0.0f;
            alignas(64) float y[kSide];
            store(y, total[r]);
            for (int m = 0; m < batch; ++m) write_element(a.y, a.dtype, (first + m) * a.rows + row + r, y[m] + bias);
        }
    }
};

// x as tiles want it: of sixteen rows at a time and kPairs columns, pairs of those at even places, then of odd ones.
void arrange(const Nf4LinearArgs& a, void* out) {
    const auto* x = static_cast<const uint16_t*>(a.x);
    auto* to = static_cast<uint32_t*>(out);
    for (int64_t first = 0; first < a.batch; first += kSide) {
        const int64_t batch = a.batch - first < kSide ? a.batch - first : kSide;
        for (int64_t column = 0; column < a.cols; column += kPairs) {
            for (int place = 0; place < 2; ++place) {
                for (int j = 0; j < kSide; ++j) {
                    for (int64_t m = 0; m < batch; ++m) {
                        const uint16_t* at = x + (first + m) * a.cols + column + 4 * j + place;
                        *to++ = at[0] | static_cast<uint32_t>(at[2]) << 16;
                    }
                }
            }
        }
    }
}

void linear(const Nf4LinearArgs& a, const void* arranged, int64_t begin, int64_t end) {
    const __m256i once = to_bf16(load(kNf4Level));  // twice, so that bit 4 of an index does not matter
    const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(once), once, 1);
    const auto* x = static_cast<const uint32_t*>(arranged);
    for (int64_t first = 0; first < a.batch; first += kSide) {
        const int batch = a.batch - first < kSide ? static_cast<int>(a.batch - first) : kSide;
        configure(batch);
        for (int64_t row = begin; row < end; row += kSide) {
            const int rows = end - row < kSide ? static_cast<int>(end - row) : kSide;
            Product{a, x + first * a.cols / 2, row, first, rows, batch, table}.run();
        }
    }
    _tile_release();
}

}  // namespace

const Nf4Linear kAmxNf4Linear = {DType::bf16, 0, kSide, linear, arrange};

}  // namespace kbitq
