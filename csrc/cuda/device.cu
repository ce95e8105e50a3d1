#include "cuda/device.h"

#include <cuda_runtime.h>

namespace kbitq {

std::string cuda_unavailable_reason() {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        cudaGetLastError();  // cleared: the process may go on without CUDA
        return std::string("the CUDA runtime answers: ") + cudaGetErrorString(error);
    }
    return count > 0 ? "" : "no CUDA device is visible";
}

}  // namespace kbitq
