// scan: the largest finite magnitude of a tensor, and how many elements are NaN or infinite and where the first is.
#pragma once

#include <cstdint>

#include "format/dtype.h"

namespace kbitq {

struct ScanArgs {
    const void* w;  // count elements
    DType dtype;
    int64_t count;
    float* amax;      // [1] out: max |w| over finite elements, 0 if there are none
    int64_t* status;  // [2] out: number of non-finite elements, flat index of the first or -1
};

void scan_cpu(const ScanArgs& args, int threads);
void scan_cuda(const ScanArgs& args, int device, void* stream);

}  // namespace kbitq
