// scan, vector: magnitudes compared as integers (their order is that of the floats), non-finite values counted only
// where a piece turns out to hold one.
#pragma once

#include <cstring>

#include "format/half.h"
#include "ops/codec/kernels.h"

namespace kbitq::KBITQ_ISA {
namespace {

constexpr int64_t kScanPiece = int64_t{1} << 14;  // elements: in the L1 or L2 when a second look is needed

// The bits of the largest magnitude of p[0] .. p[count - 1].
template <typename T>
inline uint32_t largest_bits(const T* p, int64_t count) {
    constexpr int kLanesOfT = BitScan::kBytes / sizeof(T);
    BitScan scan, other;
    int64_t i = 0;
    for (; i + 2 * kLanesOfT <= count; i += 2 * kLanesOfT) {
        scan.take(p + i);
        other.take(p + i + kLanesOfT);
    }
    alignas(64) T tail[2 * kLanesOfT] = {};
    std::memcpy(tail, p + i, sizeof(T) * static_cast<size_t>(count - i));
    scan.take(tail);
    other.take(tail + kLanesOfT);
    const uint32_t x = scan.result(T()), y = other.result(T());
    return x > y ? x : y;
}

template <DType D>
void scan_with(const ScanArgs& a, int64_t begin, int64_t end, ScanRange& out) {
    const auto* w = static_cast<const Stored<D>*>(a.w);
    out = {0.0f, 0, -1};
    for (int64_t i = begin; i < end; i += kScanPiece) {
        const int64_t stop = i + kScanPiece < end ? i + kScanPiece : end;
        const uint32_t bits = largest_bits(w + i, stop - i);
        if (bits < ElementType<D>::kInfinity) {
            const float m = widen_bits<D>(bits);
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

void scan(const ScanArgs& a, int64_t begin, int64_t end, ScanRange& out) {
    with_element(a.dtype, [&](auto d) { scan_with<d>(a, begin, end, out); });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
