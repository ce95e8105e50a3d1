// Host side of a tiled kernel's launch: shared memory above 48 KB, programmatic dependent launch, errors as
// exceptions.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "cuda/launch.cuh"

namespace kbitq::tiled {

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
        // "86:101376": as if the card were a smaller one, so that tests see its plans without having it.
        int capability = 0, shared = 0;
        const char* smaller = std::getenv("KBITQ_TEST_CARD");
        if (smaller && std::sscanf(smaller, "%d:%d", &capability, &shared) == 2) {
            f.capability = std::min(f.capability, capability);
            f.shared_bytes = std::min(f.shared_bytes, shared);
        }
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
            int shared, int device, cudaStream_t stream, int cluster = 1) {
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
    cudaLaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    if (device_facts(device).capability >= 90) {
        cudaLaunchAttribute& early = attributes[config.numAttrs++];
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        cudaLaunchAttribute& shape = attributes[config.numAttrs++];
        shape.id = cudaLaunchAttributeClusterDimension;
        shape.val.clusterDim.x = cluster;
        shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
    }
    check_cuda(cudaLaunchKernelEx(&config, kernel, params), op, "launch");
}

}  // namespace kbitq::tiled
