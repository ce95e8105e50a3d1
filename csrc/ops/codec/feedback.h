// feedback: a block of columns whose scales are known, rounded one column after the other, each error taken from the
// columns to its right before they are rounded (kbitq/codecs/feedback.py). Rows do not depend on each other. For the
// codec `planes`. Its sums may fuse: the GEMMs around it do not give equal bytes everywhere either.
#pragma once

#include <cstdint>

#include "format/codebook.h"

namespace kbitq {

struct FeedbackArgs {
    float* w;               // [rows, columns] what is left of the weights; becomes the errors, in terms of the triangle
    const float* triangle;  // [columns, columns] of U, upper
    const float* scales;    // [rows] decoded
    const float* levels;    // [2^k] as stored: with the tensor's power of two
    uint32_t* words;        // [rows, k] out
    int64_t rows;
    int columns;  // up to kBlock
    int k;
};

void feedback_cpu(const FeedbackArgs& args, int threads);
void feedback_cuda(const FeedbackArgs& args, int device, void* stream);

// One row. `triangle`: [kBlock][kBlock], zeros past the columns; `mid`: the thresholds between the levels.
template <int K>
KBITQ_HD void feedback_row(const FeedbackArgs& a, int64_t row, const float* triangle, const float* levels,
                           const float* mid, int zero) {
    const float s = a.scales[row];
    float* const w = a.w + row * a.columns;
    float left[kBlock];
    uint32_t plane[K] = {};
    for (int j = 0; j < kBlock; ++j) left[j] = j < a.columns ? w[j] : 0.0f;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int j = 0; j < kBlock; ++j) {
        const bool there = j < a.columns;
        const int index = s > 0.0f && there ? nearest_index<K>(mid, left[j], s) : zero;
        const float error = there ? (left[j] - levels[index] * s) / triangle[j * kBlock + j] : 0.0f;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
        for (int t = j + 1; t < kBlock; ++t) left[t] -= error * triangle[j * kBlock + t];
        left[j] = error;
        for (int b = 0; b < K; ++b) plane[b] |= static_cast<uint32_t>(index >> b & 1) << j;
    }
    for (int j = 0; j < a.columns; ++j) w[j] = left[j];
    for (int b = 0; b < K; ++b) a.words[row * K + b] = plane[b];
}

// What all rows share, filled by thread `first` of `step`.
struct FeedbackTables {
    float triangle[kBlock * kBlock];
    float levels[kMaxLevels], mid[kMaxLevels];
};

KBITQ_HD void fill_feedback_tables(FeedbackTables& t, const FeedbackArgs& a, int first, int step) {
    for (int i = first; i < kBlock * kBlock; i += step) {
        const int r = i / kBlock, c = i % kBlock;
        t.triangle[i] = r < a.columns && c < a.columns && c >= r ? a.triangle[r * a.columns + c] : 0.0f;
    }
    const int levels = 1 << a.k;
    for (int i = first; i < levels; i += step) {
        t.levels[i] = a.levels[i];
        t.mid[i] = i + 1 < levels ? level_midpoint(a.levels[i], a.levels[i + 1]) : 0.0f;
    }
}

}  // namespace kbitq
