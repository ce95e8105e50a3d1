#include "cpu/parallel.h"
#include "ops/codec/kernels.h"
#include "ops/codec/stats.h"

namespace kbitq {

constexpr int64_t kGrainElements = int64_t{1} << 14;

void stats_cpu(const StatsArgs& a, int threads) {
    const Kernels& k = kernels();
    const int64_t grain = a.packed.cols > 0 ? kGrainElements / a.packed.cols + 1 : 1;
    parallel_for(a.packed.rows, grain, threads, [&](int64_t begin, int64_t end) { k.stats(a, begin, end); });
}

}  // namespace kbitq
