// Blocks of GGUF files: to values, and multiplied as they are. formats/gguf_blocks.h has the blocks.
#pragma once

#include <cstdint>

#include "format/dtype.h"

namespace kbitq {

// Values of a block and its bytes; zeros for a type that is not one of blocks, or not known.
struct GgufSizes {
    int values, bytes;
};
GgufSizes gguf_sizes(int type);

struct GgufDecodeArgs {
    const uint8_t* blocks;
    int64_t count;  // of blocks
    int type;       // ggml's number
    void* out;      // [count * values]
    DType dtype;
};

// For each of `experts` matrices [rows, cols]: y = x W^T.
struct GgufLinearArgs {
    const uint8_t* blocks;
    int type;
    int64_t experts, rows, cols;
    const void* x;  // [experts, batch, cols]
    void* y;        // [experts, batch, rows]
    int64_t batch;
    DType dtype;  // of x and y; sums are float32
};

void decode_gguf_cpu(const GgufDecodeArgs& args, int threads);
void decode_gguf_cuda(const GgufDecodeArgs& args, int device, void* stream);
void linear_gguf_cpu(const GgufLinearArgs& args, int threads);
void linear_gguf_cuda(const GgufLinearArgs& args, int device, void* stream);

}  // namespace kbitq
