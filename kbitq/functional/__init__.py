"""Operators on single tensors, for programs that bring their own layers and files.

``drop_in`` has the reference implementation's functions.
"""

from kbitq.functional.drop_in import (
    create_normal_float_codebook,
    decode_absmax_e4m4,
    dequantize_kbit,
    encode_absmax_e4m4,
    quantize_kbit,
)

__all__ = [
    "create_normal_float_codebook",
    "decode_absmax_e4m4",
    "dequantize_kbit",
    "encode_absmax_e4m4",
    "quantize_kbit",
]
