// The kernels of code_stream.h, compiled once for each instruction set (KBITQ_ISA is its namespace): loops over runs of
// codes that the compiler vectorises, with the two instructions that it does not find.
#include <cstring>

#include "format/half.h"
#include "ops/formats/code_stream.h"
#if defined(__BMI2__)
#include <immintrin.h>
#endif

namespace kbitq::KBITQ_ISA {
namespace {

constexpr int kRun = 256;  // codes in hand at a time; a multiple of 8, so that a run of a stream begins with a byte

// Eight codes of `bits` each in a row of bytes, and back.
inline uint64_t spread(uint64_t dense, int bits) {
    const uint64_t mask = 0x0101010101010101ull * ((1u << bits) - 1);
#if defined(__BMI2__)
    return _pdep_u64(dense, mask);
#else
    uint64_t out = 0;
    for (int i = 0; i < 8; ++i) out |= ((dense >> (i * bits)) & (mask & 0xFF)) << (8 * i);
    return out;
#endif
}

inline uint64_t gather(uint64_t bytes, int bits) {
    const uint64_t mask = 0x0101010101010101ull * ((1u << bits) - 1);
#if defined(__BMI2__)
    return _pext_u64(bytes, mask);
#else
    uint64_t out = 0;
    for (int i = 0; i < 8; ++i) out |= ((bytes >> (8 * i)) & (mask & 0xFF)) << (i * bits);
    return out;
#endif
}

inline uint64_t load_bytes(const uint8_t* p, int64_t left) {
    uint64_t word = 0;
    std::memcpy(&word, p, left < 8 ? static_cast<size_t>(left) : 8);
    return word;
}

// Codes [first, first + count) of a row, count at most kRun; writes up to 7 more.
inline void take_stream(const CodeRows& a, int64_t row, int64_t first, int count, uint8_t* out) {
    const uint8_t* const end = a.data + a.nbytes;
    const uint8_t* p = a.data + a.starts[row] + first * a.bits / 8;
    const bool swap = a.order == CodeOrder::high_first;
    for (int i = 0; i < count; i += 8, p += a.bits) {
        uint64_t dense = end - p >= 8 ? load_bytes(p, 8) : load_bytes(p, end - p);
        if (swap) dense = ((dense >> 4) & 0x0F0F0F0F0F0F0F0Full) | ((dense & 0x0F0F0F0F0F0F0F0Full) << 4);
        const uint64_t bytes = spread(dense, a.bits);
        std::memcpy(out + i, &bytes, 8);
    }
}

inline void take_fields(const CodeRows& a, int64_t row, int64_t first, int count, uint8_t* out) {
    const uint32_t mask = (1u << a.bits) - 1;
    const int shift = a.shifts[row];
    const uint8_t* const p = a.data + a.starts[row];
    if (a.order == CodeOrder::bytes) {
        for (int i = 0; i < count; ++i) out[i] = static_cast<uint8_t>((p[first + i] >> shift) & mask);
        return;
    }
    for (int i = 0; i < count; ++i) {
        uint32_t word;
        std::memcpy(&word, p + 4 * (first + i), 4);
        out[i] = static_cast<uint8_t>((word >> shift) & mask);
    }
}

inline void take(const CodeRows& a, int64_t row, int64_t first, int count, uint8_t* out) {
    if (a.order == CodeOrder::stream || a.order == CodeOrder::high_first) {
        take_stream(a, row, first, count, out);
    } else {
        take_fields(a, row, first, count, out);
    }
}

void unpack(const UnpackArgs& a, int64_t begin, int64_t end) {
    uint8_t run[kRun + 8];
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t c = 0; c < a.codes.cols; c += kRun) {
            const int count = static_cast<int>(a.codes.cols - c < kRun ? a.codes.cols - c : kRun);
            take(a.codes, row, c, count, run);
            std::memcpy(a.out + row * a.codes.cols + c, run, static_cast<size_t>(count));
        }
    }
}

void pack(const PackArgs& a, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        uint8_t* out = a.out + row * a.row_bytes;
        const uint8_t* const codes = a.codes + row * a.cols;
        int64_t at = 0;
        for (int64_t c = 0; c < a.cols; c += 8, at += a.bits) {
            const uint64_t dense = gather(load_bytes(codes + c, a.cols - c), a.bits);
            const int64_t left = a.row_bytes - at;
            std::memcpy(out + at, &dense, static_cast<size_t>(left < a.bits ? left : a.bits));
        }
        if (at < a.row_bytes) std::memset(out + at, 0, static_cast<size_t>(a.row_bytes - at));
    }
}

template <DType D>
inline Stored<D> rounded(float v) {
    if constexpr (D == DType::bf16) {
        return v != v ? static_cast<uint16_t>(0x7FC0) : float_to_bf16(v);
    } else {
        return round_to<D>(v);
    }
}

template <DType D>
inline void round_run(const float* v, int count, Stored<D>* out) {
    int i = 0;
#if defined(__F16C__)
    if constexpr (D == DType::f16) {
        for (; i + 8 <= count; i += 8) {
            const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(v + i), _MM_FROUND_TO_NEAREST_INT);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
        }
    }
#endif
    for (; i < count; ++i) out[i] = rounded<D>(v[i]);
}

// Rounds in place: what an operation of the dtype leaves.
template <DType D>
inline void settle(float* v, int count) {
    if constexpr (D != DType::f32) {
        Stored<D> half[kRun];
        round_run<D>(v, count, half);
        int i = 0;
#if defined(__F16C__)
        if constexpr (D == DType::f16) {
            for (; i + 8 <= count; i += 8) {
                _mm256_storeu_ps(v + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i))));
            }
        }
#endif
        for (; i < count; ++i) v[i] = widen<D>(half[i]);
    }
}

inline void look_up(const float* table, const uint8_t* codes, int count, float* v) {
    if (!table) {
        for (int i = 0; i < count; ++i) v[i] = static_cast<float>(codes[i]);
        return;
    }
    for (int i = 0; i < count; ++i) v[i] = table[codes[i]];
}

// Calls body(i, stop, group) for runs of codes [c, c + count) that are of one group, numbered from c.
template <typename Body>
inline void for_runs(const DecodeCodesArgs& a, int64_t c, int count, Body body) {
    int64_t group = (c + a.phase) / a.group_size, left = a.group_size - (c + a.phase) % a.group_size;
    for (int i = 0; i < count; ++group, left = a.group_size) {
        const int stop = left < count - i ? i + static_cast<int>(left) : count;
        body(i, stop, group);
        i = stop;
    }
}

// One operation over codes [c, c + count) of a row: v = op(v, parameter of its group).
template <typename Op>
inline void by_group(const DecodeCodesArgs& a, const float* of_row, int64_t c, int count, float* v, Op op) {
    if (a.group_of) {
        for (int i = 0; i < count; ++i) v[i] = op(v[i], of_row[a.group_of[c + i]]);
    } else if (a.group_size == 1) {
        for (int i = 0; i < count; ++i) v[i] = op(v[i], of_row[c + i]);
    } else {
        for_runs(a, c, count, [=](int i, int stop, int64_t group) {
            const float of_group = of_row[group];
            for (; i < stop; ++i) v[i] = op(v[i], of_group);
        });
    }
}

// v = (code - zero) * scale, two operations for each code while it is at hand.
inline void scale_codes(const DecodeCodesArgs& a, const float* scale, const float* zero, int64_t c, int count,
                        const uint8_t* codes, float* v) {
    if (a.group_of) {
        const int32_t* const group = a.group_of + c;
        for (int i = 0; i < count; ++i) v[i] = (static_cast<float>(codes[i]) - zero[group[i]]) * scale[group[i]];
    } else if (a.group_size == 1) {
        for (int i = 0; i < count; ++i) v[i] = (static_cast<float>(codes[i]) - zero[c + i]) * scale[c + i];
    } else {
        for_runs(a, c, count, [=](int i, int stop, int64_t group) {
            const float z = zero[group], s = scale[group];
            for (; i < stop; ++i) v[i] = (static_cast<float>(codes[i]) - z) * s;
        });
    }
}

// (v - zero) * scale + bias, an operation after another, each rounded to D if that is asked for.
template <DType D>
inline void apply_each(const DecodeCodesArgs& a, int64_t row, int64_t c, int count, float* v) {
    const int64_t at = row * a.stride;
    if (a.zero) {
        by_group(a, a.zero + at, c, count, v, [](float x, float z) { return x - z; });
        if (a.round_each) settle<D>(v, count);
    }
    by_group(a, a.scale + at, c, count, v, [](float x, float s) { return x * s; });
    if (a.bias) {
        if (a.round_each) settle<D>(v, count);
        by_group(a, a.bias + at, c, count, v, [](float x, float b) { return x + b; });
    }
}

template <DType D>
void decode_row(const DecodeCodesArgs& a, int64_t row) {
    const int64_t cols = a.codes.cols;
    Stored<D>* const out = static_cast<Stored<D>*>(a.out) + row * cols;
    const bool at_once = a.zero && !a.table && !a.bias && !a.round_each;
    uint8_t codes[kRun + 8];
    float v[kRun];
    for (int64_t c = 0; c < cols; c += kRun) {
        const int count = static_cast<int>(cols - c < kRun ? cols - c : kRun);
        take(a.codes, row, c, count, codes);
        if (at_once) {
            scale_codes(a, a.scale + row * a.stride, a.zero + row * a.stride, c, count, codes, v);
        } else {
            look_up(a.table, codes, count, v);
            apply_each<D>(a, row, c, count, v);
        }
        round_run<D>(v, count, out + c);
    }
}

void decode(const DecodeCodesArgs& a, int64_t begin, int64_t end) {
    with_element(a.dtype, [&](auto d) {
        for (int64_t row = begin; row < end; ++row) decode_row<d>(a, row);
    });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
