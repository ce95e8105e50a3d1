// What a quantize call asks of a codec, whichever it is.
#pragma once

namespace kbitq {

// How the scale of a block is chosen: the byte nearest to its largest magnitude; the byte of least squared error; that
// magnitude itself, for float scales; or the byte that stands in its place already (the trellis only).
enum class ScaleRule { absmax, mse, exact, given };

// The numbers that every block of a call shares. A codec adds its own (codecs/planes_encode_tables.h).
struct EncodeTables {
    float to_blocks;  // 2^-x: blocks are encoded as W * 2^-x
    int top;          // the largest scale byte that may be chosen
};

static inline int clip_byte(const EncodeTables& t, int byte) { return byte < 0 ? 0 : byte > t.top ? t.top : byte; }

}  // namespace kbitq
