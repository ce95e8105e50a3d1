#define KBITQ_ISA avx512
#include "ops/formats/code_stream_kernels.h"

namespace kbitq {

const CodeKernels kAvx512Codes = {avx512::unpack, avx512::pack, avx512::decode};

}  // namespace kbitq
