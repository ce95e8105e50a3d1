"""Operators on single tensors, for programs that bring their own layers and files.

``drop_in`` and ``words`` have the reference implementation's functions and its first layout, ``nf4`` bitsandbytes' NF4,
``gguf`` llama.cpp's blocks, ``integers``, ``fake`` and ``w8a8`` quantization to integers, for training and products.
"""

from kbitq.functional.drop_in import (
    create_normal_float_codebook,
    decode_absmax_e4m4,
    dequantize_kbit,
    encode_absmax_e4m4,
    quantize_kbit,
)
from kbitq.functional.fake import fake_quantize, fake_quantize_kbit
from kbitq.functional.gguf import dequantize_gguf, gguf_linear
from kbitq.functional.integers import IntTensor, dequantize_int, quantize_int
from kbitq.functional.nf4 import NF4, dequantize_nf4, nf4_linear, quantize_nf4
from kbitq.functional.w8a8 import fold_smooth, int8_matmul, linear_w8a8, smooth_scales
from kbitq.functional.words import compact_codebook, dequantize_words, pack_words, quantize_words, unpack_words

__all__ = [
    "NF4",
    "IntTensor",
    "compact_codebook",
    "create_normal_float_codebook",
    "decode_absmax_e4m4",
    "dequantize_gguf",
    "dequantize_int",
    "dequantize_kbit",
    "dequantize_nf4",
    "dequantize_words",
    "encode_absmax_e4m4",
    "fake_quantize",
    "fake_quantize_kbit",
    "fold_smooth",
    "gguf_linear",
    "int8_matmul",
    "linear_w8a8",
    "nf4_linear",
    "pack_words",
    "quantize_int",
    "quantize_kbit",
    "quantize_nf4",
    "quantize_words",
    "smooth_scales",
    "unpack_words",
]
