#define KBITQ_ISA scalar
#include "ops/formats/code_stream_kernels.h"

namespace kbitq {

const CodeKernels kScalarCodes = {scalar::unpack, scalar::pack, scalar::decode};

}  // namespace kbitq
