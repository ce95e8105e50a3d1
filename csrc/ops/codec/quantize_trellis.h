// quantize_cuda of the codec `trellis`.
#pragma once

#include "ops/codec/quantize.h"

namespace kbitq {

void quantize_trellis_cuda(const QuantizeArgs& args, int device, void* stream);

}  // namespace kbitq
