"""Operators on single tensors, for programs that bring their own layers and files.

``drop_in`` has the reference implementation's functions, ``nf4`` those of bitsandbytes' NF4.
"""

from kbitq.functional.drop_in import (
    create_normal_float_codebook,
    decode_absmax_e4m4,
    dequantize_kbit,
    encode_absmax_e4m4,
    quantize_kbit,
)
from kbitq.functional.nf4 import NF4, dequantize_nf4, nf4_linear, quantize_nf4

__all__ = [
    "NF4",
    "create_normal_float_codebook",
    "decode_absmax_e4m4",
    "dequantize_kbit",
    "dequantize_nf4",
    "encode_absmax_e4m4",
    "nf4_linear",
    "quantize_kbit",
    "quantize_nf4",
]
