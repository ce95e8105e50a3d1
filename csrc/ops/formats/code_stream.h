// Codes of other tools' formats: a few bits for each weight, as dense streams or as fields of words. unpack and pack
// move codes between a stream and bytes; decode_codes goes on to values. CPU only.
#pragma once

#include <cstdint>

#include "format/dtype.h"

namespace kbitq {

constexpr int kMaxCodeBits = 8;

// Where the codes of a row are.
enum class CodeOrder : int {
    stream,      // code i at bit i * bits of the row's bytes, least significant bit first
    high_first,  // 4 bits: the high half of a byte is the first of its two codes
    words,       // code i in 32-bit word i of the row, at the row's shift
    bytes,       // code i in byte i of the row, at the row's shift
};

struct CodeRows {
    const uint8_t* data;
    int64_t nbytes;         // of data
    const int64_t* starts;  // [rows], byte of data at which a row's codes begin
    const int32_t* shifts;  // [rows], for words and bytes
    int64_t rows, cols;
    int bits;
    CodeOrder order;
};

struct UnpackArgs {
    CodeRows codes;
    uint8_t* out;  // [rows, cols]
};

struct PackArgs {
    const uint8_t* codes;  // [rows, cols], each below 2^bits
    int64_t rows, cols;
    int bits;
    uint8_t* out;  // [rows, row_bytes], a stream each, zeros behind it
    int64_t row_bytes;
};

// value = (table[code] - zero) * scale + bias in float32, rounded once, or with round_each after every operation. Group
// of column c: group_of[c], or (c + phase) / group_size.
struct DecodeCodesArgs {
    CodeRows codes;
    const float* table;  // [2^bits]; null: the code itself
    const float* scale;  // [rows, groups]
    const float* zero;   // [rows, groups] or null
    const float* bias;   // [rows, groups] or null
    int64_t groups;
    int64_t stride;           // from a row of these three to the next: groups, or 0 where all rows share one
    const int32_t* group_of;  // [cols] or null
    int64_t group_size, phase;
    bool round_each;
    void* out;  // [rows, cols]
    DType dtype;
};

void unpack_codes_cpu(const UnpackArgs& args, int threads);
void pack_codes_cpu(const PackArgs& args, int threads);
void decode_codes_cpu(const DecodeCodesArgs& args, int threads);

// The kernels of one instruction set, each for a range of rows.
struct CodeKernels {
    void (*unpack)(const UnpackArgs&, int64_t begin, int64_t end);
    void (*pack)(const PackArgs&, int64_t begin, int64_t end);
    void (*decode)(const DecodeCodesArgs&, int64_t begin, int64_t end);
};

extern const CodeKernels kScalarCodes;
#if defined(KBITQ_X86)
extern const CodeKernels kAvx2Codes;
extern const CodeKernels kAvx512Codes;
#endif

}  // namespace kbitq
