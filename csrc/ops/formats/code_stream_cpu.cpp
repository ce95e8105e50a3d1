#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/simd_level.h"
#include "ops/formats/code_stream.h"

namespace kbitq {
namespace {

constexpr int64_t kGrainCodes = 32'768;  // some ten microseconds

const CodeKernels& code_kernels() { return KBITQ_AT_SIMD_LEVEL(Codes); }

int64_t grain_rows(int64_t cols) { return std::max<int64_t>(1, kGrainCodes / std::max<int64_t>(cols, 1)); }

}  // namespace

void unpack_codes_cpu(const UnpackArgs& a, int threads) {
    const CodeKernels& k = code_kernels();
    parallel_for(a.codes.rows, grain_rows(a.codes.cols), threads,
                 [&](int64_t begin, int64_t end) { k.unpack(a, begin, end); });
}

void pack_codes_cpu(const PackArgs& a, int threads) {
    const CodeKernels& k = code_kernels();
    parallel_for(a.rows, grain_rows(a.cols), threads, [&](int64_t begin, int64_t end) { k.pack(a, begin, end); });
}

void decode_codes_cpu(const DecodeCodesArgs& a, int threads) {
    const CodeKernels& k = code_kernels();
    parallel_for(a.codes.rows, grain_rows(a.codes.cols), threads,
                 [&](int64_t begin, int64_t end) { k.decode(a, begin, end); });
}

}  // namespace kbitq
