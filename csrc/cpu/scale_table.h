// The values of the 256 scale bytes, so that decoding one costs a load.
#pragma once

namespace kbitq {

const float* scale_table();

}  // namespace kbitq
