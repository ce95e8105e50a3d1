// NF4, the 4-bit NormalFloat of QLoRA as bitsandbytes stores it: codes of 4 bits, two in a byte, the first in the high
// half; a float32 scale for each block of the flattened tensor. A value is level[code] * scale, rounded once.
#pragma once

#include <cstdint>

#include "format/block.h"

namespace kbitq {

constexpr int kNf4Levels = 16;
constexpr int kNf4MinBlock = 64, kNf4MaxBlock = 4096;  // and the powers of two between them
constexpr float kNf4LeastScale = 1e-38f;               // that values are divided by
constexpr int kNf4Zero = 7;                            // the code of 0

// Ascending; the first and last are the ends of a block's range.
constexpr float kNf4Level[kNf4Levels] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// A value goes to the level above bound i if it is greater than the bound.
struct Nf4Bounds {
    float bound[kNf4Levels] = {};  // 15 and one that is not used
    constexpr Nf4Bounds() {
        for (int i = 0; i + 1 < kNf4Levels; ++i) bound[i] = (kNf4Level[i] + kNf4Level[i + 1]) / 2.0f;
    }
};
constexpr Nf4Bounds kNf4Bounds;

// The code of v, a value divided by its block's scale.
KBITQ_HD int nf4_code(float v, const float* bound) {
    int code = v > bound[7] ? 8 : 0;
    code += v > bound[code + 3] ? 4 : 0;
    code += v > bound[code + 1] ? 2 : 0;
    return code + (v > bound[code] ? 1 : 0);
}

}  // namespace kbitq
