// Facts about the build and the machine.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "cpu/simd_level.h"
#if defined(KBITQ_HAS_CUDA)
#include "cuda/device.h"
#endif

namespace kbitq {
namespace {

std::vector<std::string> simd_levels() {
    std::vector<std::string> names;
    for (SimdLevel level : available_simd_levels()) names.emplace_back(simd_level_name(level));
    return names;
}

// Empty if CUDA can be used; else a clause that says why not.
std::string cuda_status() {
#if defined(KBITQ_HAS_CUDA)
    return cuda_unavailable_reason();
#else
    return KBITQ_CUDA_REASON;
#endif
}

}  // namespace

void bind_runtime(pybind11::module_& m) {
    m.attr("version") = KBITQ_VERSION;
#if defined(KBITQ_HAS_CUDA)
    m.attr("has_cuda") = true;
#else
    m.attr("has_cuda") = false;
#endif
    m.def("cuda_status", &cuda_status, "Why CUDA cannot be used; empty if it can.");
    m.def("simd", [] { return std::string(simd_level_name(simd_level())); }, "The CPU instruction set in use.");
    m.def("simd_levels", &simd_levels, "The CPU instruction sets this machine has, scalar first.");
    m.def("tiles", &multiplies_tiles, "Whether bfloat16 products use tile registers (AMX).");
    m.def("allow_tiles", &allow_tiles, pybind11::arg("allowed"), "Whether they may (for tests).");
    m.def("set_simd", &set_simd_level, pybind11::arg("level"), "Use this CPU instruction set from now on (for tests).");
}

}  // namespace kbitq
