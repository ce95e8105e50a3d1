// What each binding file adds to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace kbitq {

void bind_codec(pybind11::module_& m);    // scan, quantize, dequantize, stats
void bind_formats(pybind11::module_& m);  // unpack_codes, pack_codes, decode_codes
void bind_gguf(pybind11::module_& m);     // decode_gguf, linear_gguf
void bind_linear(pybind11::module_& m);   // linear
void bind_tiles(pybind11::module_& m);    // repack, linear_tiles, decode_tiles
void bind_nf4(pybind11::module_& m);      // nf4_quantize, nf4_dequantize, nf4_linear
void bind_runtime(pybind11::module_& m);  // version, instruction sets, CUDA

}  // namespace kbitq
