// NF4 (format/nf4.h): quantize and dequantize a flattened tensor, and y = x W^T (+ bias) for few rows of x.
#pragma once

#include <cstdint>

#include "format/dtype.h"

namespace kbitq {

struct Nf4QuantizeArgs {
    const void* w;  // [count]
    DType dtype;
    int64_t count;
    int block;
    uint8_t* codes;  // [ceil(count / 2)]
    float* scales;   // [ceil(count / block)]
};

struct Nf4DequantizeArgs {
    const uint8_t* codes;
    const float* scales;
    int64_t count;
    int block;
    void* out;  // [count]
    DType dtype;
};

struct Nf4LinearArgs {
    const void* x;  // [batch, cols]
    DType dtype;    // of x, bias and y
    int64_t batch;
    const uint8_t* codes;
    const float* scales;
    int64_t rows, cols;  // of W; block divides cols
    int block;
    const void* bias;  // [rows] or null
    void* y;           // [batch, rows]
};

constexpr int kNf4FewRows = 8;  // of x that the CUDA kernel takes

void nf4_quantize_cpu(const Nf4QuantizeArgs& args, int threads);
void nf4_dequantize_cpu(const Nf4DequantizeArgs& args, int threads);
void nf4_linear_cpu(const Nf4LinearArgs& args, int threads);
void nf4_quantize_cuda(const Nf4QuantizeArgs& args, int device, void* stream);
void nf4_dequantize_cuda(const Nf4DequantizeArgs& args, int device, void* stream);
void nf4_linear_cuda(const Nf4LinearArgs& args, int device, void* stream);

}  // namespace kbitq
