// Host side of a matmul kernel's launch: shared memory above 48 KB, programmatic dependent launch, errors as
// exceptions.
#pragma once

#include "cuda/launch.cuh"

namespace kbitq::matmul {

constexpr int kMaxDevices = 64;

struct DeviceFacts {
    int multiprocessors = 0;
    int shared_bytes = 0;  // of one block, at most
    int capability = 0;    // 90 for sm_90
};

// Read once per device.
inline const DeviceFacts& device_facts(int device) {
    static DeviceFacts facts[kMaxDevices];
    if (device < 0 || device >= kMaxDevices) throw std::runtime_error("device index out of range");
    DeviceFacts& f = facts[device];
    if (f.multiprocessors == 0) {
        int major = 0, minor = 0;
        check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device", "query");
        check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device", "query");
        check_cuda(cudaDeviceGetAttribute(&f.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "device",
                   "query");
        f.capability = major * 10 + minor;
        f.multiprocessors = multiprocessors(device);
    }
    return f;
}

template <typename Params>
using Kernel = void (*)(Params);

using Raised = bool[kMaxDevices];

// Launches `kernel` (a template instance: `raised` must be that instance's own) with `shared` bytes of dynamic shared
// memory. Where the card knows it, the kernel may start before the one ahead of it in the stream has ended: kernels
// launched so call wait_for_dependency() before they read what another kernel wrote.
template <typename Params>
void launch(const char* op, Kernel<Params> kernel, Raised& raised, const Params& params, dim3 grid, int threads,
            int shared, int device, cudaStream_t stream) {
    if (!raised[device]) {
        check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, device_facts(device).shared_bytes),
                   op, "shared memory");
        raised[device] = true;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = device_facts(device).capability >= 90 ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, kernel, params), op, "launch");
}

}  // namespace kbitq::matmul
