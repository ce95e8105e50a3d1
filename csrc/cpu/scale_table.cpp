#include "cpu/scale_table.h"

#include "cpu/float_env.h"
#include "format/scale_e4m4.h"

namespace kbitq {

const float* scale_table() {
    struct Table {
        float value[kScaleBytes];
        Table() {
            StrictFloat strict;
            for (int b = 0; b < kScaleBytes; ++b) value[b] = decode_e4m4(static_cast<uint32_t>(b));
        }
    };
    static const Table table;
    return table.value;
}

}  // namespace kbitq
