// feedback on the GPU: a thread owns a row, whose 32 columns are in registers; what all rows share is in shared memory.
#include "cuda/launch.cuh"
#include "ops/codec/feedback.h"

namespace kbitq {
namespace {

constexpr int kThreads = 64;  // few: a block has some thousand rows at most, and all multiprocessors should get some

template <int K>
__global__ __launch_bounds__(kThreads) void feedback_kernel(const FeedbackArgs args) {
    __shared__ FeedbackTables tables;
    fill_feedback_tables(tables, args, threadIdx.x, kThreads);
    __syncthreads();
    const int zero = zero_index(tables.mid, 1 << K);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (row < args.rows) feedback_row<K>(args, row, tables.triangle, tables.levels, tables.mid, zero);
}

}  // namespace

void feedback_cuda(const FeedbackArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    if (args.rows == 0) return;
    const auto grid = static_cast<unsigned>(divide_up(args.rows, kThreads));
    with_bits(args.k,
              [&](auto k) { feedback_kernel<k><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args); });
    check_cuda(cudaGetLastError(), "feedback", matrix_shape(args.rows, args.columns));
}

}  // namespace kbitq
