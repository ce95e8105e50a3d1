// What the vector kernels of all codecs take and give. A codec is a struct C (codecs/planes_simd.h: Planes<K>) with
//
//     kWords                               words of a block
//     kScaleBlocks                         blocks that share a scale
//     Decoder(codebook)                    what decoding needs of one codebook, made once for a range of blocks
//       decode_block<Order>(level, words)  levels of a block, not yet times its scale
//     Encoder(tables)                      likewise
//       encode_block(source, rule, words, scale)
//                                          fills the words of a block, and its scale byte unless the rule is `exact`
//
//     kTogether                            whether Encoder takes many blocks side by side instead: kUnits, put, encode,
//                                          take (codecs/trellis_encode_simd.h)
//
// and a line in codecs/dispatch_simd.h. The ops are templates on C.
#pragma once

#include "codecs/encoding.h"
#include "cpu/block_simd.h"
#include "format/scale_e4m4.h"

namespace kbitq::KBITQ_ISA {
namespace {

// Where the elements of a block lie in the kVectors vectors of kLanes lanes.
enum class Order {
    row,         // lane i of vector v has element kLanes * v + i
    interleaved  // ... element kVectors * i + v: cheaper to unpack, for sums that do not ask who is where
};

// A block to encode.
struct SourceBlock {
    F v[kVectors];       // W * 2^-x, zeros past the row's end
    F weight[kVectors];  // of the squared errors, zeros past the row's end; where not `weighted`, not set: all one
    bool weighted;
    int length;  // elements before the row's end
    float most;  // max |v|
};

}  // namespace
}  // namespace kbitq::KBITQ_ISA
