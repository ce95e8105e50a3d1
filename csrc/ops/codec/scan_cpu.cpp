#include <mutex>

#include "cpu/parallel.h"
#include "ops/codec/kernels.h"
#include "ops/codec/scan.h"

namespace kbitq {

void scan_cpu(const ScanArgs& a, int threads) {
    const Kernels& k = kernels();
    ScanRange total{0.0f, 0, -1};
    std::mutex merging;
    parallel_for(a.count, int64_t{1} << 16, threads, [&](int64_t begin, int64_t end) {
        ScanRange part;
        k.scan(a, begin, end, part);
        std::lock_guard<std::mutex> lock(merging);
        total.amax = part.amax > total.amax ? part.amax : total.amax;
        total.nonfinite += part.nonfinite;
        if (part.first >= 0 && (total.first < 0 || part.first < total.first)) total.first = part.first;
    });
    *a.amax = total.amax;
    a.status[0] = total.nonfinite;
    a.status[1] = total.first;
}

}  // namespace kbitq
