#include "cpu/parallel.h"
#include "ops/codec/feedback.h"

namespace kbitq {

constexpr int64_t kGrainRows = 64;

void feedback_cpu(const FeedbackArgs& a, int threads) {
    FeedbackTables tables;
    fill_feedback_tables(tables, a, 0, 1);
    const int zero = zero_index(tables.mid, 1 << a.k);
    with_bits(a.k, [&](auto k) {
        parallel_for(a.rows, kGrainRows, threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                feedback_row<k>(a, row, tables.triangle, tables.levels, tables.mid, zero);
            }
        });
    });
}

}  // namespace kbitq
