#define KBITQ_ISA avx2
#include "ops/formats/code_stream_kernels.h"

namespace kbitq {

const CodeKernels kAvx2Codes = {avx2::unpack, avx2::pack, avx2::decode};

}  // namespace kbitq
