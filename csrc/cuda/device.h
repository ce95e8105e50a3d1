// What the bindings ask of the CUDA runtime.
#pragma once

#include <string>

namespace kbitq {

// Empty if a CUDA device can be used; else a clause that says why not (no driver, no device, too old a driver).
std::string cuda_unavailable_reason();

}  // namespace kbitq
