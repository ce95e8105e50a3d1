// scan, vector: magnitudes compared as integers (their order is that of the floats), non-finite values counted only
// where a piece turns out to hold one.
#pragma once

#include "codecs/planes_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

constexpr int64_t kScanPiece = int64_t{1} << 14;  // elements: in the L1 or L2 when a second look is needed

// The largest magnitude's bits, as the type's own integer, over [begin, end).
inline uint32_t largest_bits(const ScanArgs& a, int64_t begin, int64_t end) {
    const int64_t size = dtype_size(a.dtype), step = BitScan::kBytes / size;
    const char* p = static_cast<const char*>(a.w);
    BitScan scan, other;
    int64_t i = begin;
    if (a.dtype == DType::f32) {
        for (; i + 2 * step <= end; i += 2 * step) {
            scan.take32(p + i * size);
            other.take32(p + (i + step) * size);
        }
    } else {
        for (; i + 2 * step <= end; i += 2 * step) {
            scan.take16(p + i * size);
            other.take16(p + (i + step) * size);
        }
    }
    alignas(64) char tail[2 * BitScan::kBytes] = {};
    __builtin_memcpy(tail, p + i * size, static_cast<size_t>((end - i) * size));
    for (int t = 0; t < 2; ++t) {
        if (a.dtype == DType::f32) {
            scan.take32(tail + t * BitScan::kBytes);
        } else {
            scan.take16(tail + t * BitScan::kBytes);
        }
    }
    const uint32_t x = a.dtype == DType::f32 ? scan.result32() : scan.result16();
    const uint32_t y = a.dtype == DType::f32 ? other.result32() : other.result16();
    return x > y ? x : y;
}

void scan(const ScanArgs& a, int64_t begin, int64_t end, ScanRange& out) {
    const uint32_t infinity = a.dtype == DType::f32 ? 0x7F800000u : a.dtype == DType::bf16 ? 0x7F80u : 0x7C00u;
    out = {0.0f, 0, -1};
    for (int64_t i = begin; i < end; i += kScanPiece) {
        const int64_t stop = i + kScanPiece < end ? i + kScanPiece : end;
        const uint32_t bits = largest_bits(a, i, stop);
        if (bits < infinity) {
            const float m = a.dtype == DType::f32    ? bits_float(bits)
                            : a.dtype == DType::bf16 ? bf16_to_float(static_cast<uint16_t>(bits))
                                                     : f16_to_float(static_cast<uint16_t>(bits));
            out.amax = m > out.amax ? m : out.amax;
            continue;
        }
        ScanRange piece;
        kScalarKernels.scan(a, i, stop, piece);
        out.amax = piece.amax > out.amax ? piece.amax : out.amax;
        if (out.nonfinite == 0) out.first = piece.first;
        out.nonfinite += piece.nonfinite;
    }
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
