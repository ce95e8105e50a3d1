"""The dtype of a model's norms and biases, which llama.cpp stores as float32 whatever they were. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Sequence

CANDIDATES = {"BF16": "bfloat16", "F16": "float16"}
"""Dtypes that vectors may have had, and what config.json calls them; the first that fits is taken."""


def dtype_that_fits(vectors: Sequence[tuple[bytes, int]]) -> str | None:
    """The first candidate that holds all values exactly, or None.

    Args:
        vectors: little-endian float32 values of each, and what is taken off them first.
    """
    shifted = [data if not less else _less(data, less) for data, less in vectors]
    tests = {"BF16": _fits_bf16, "F16": _fits_f16}
    return next((dtype for dtype in CANDIDATES if shifted and all(map(tests[dtype], shifted))), None)


def _less(data: bytes, less: int) -> bytes:
    """Each value less a number, rounded to float32."""
    count = len(data) // 4
    return struct.pack(f"<{count}f", *(v - less for v in struct.unpack(f"<{count}f", data)))


def _fits_bf16(data: bytes) -> bool:
    """Whether the lower halves of all values are zero."""
    count = len(data) // 4
    return data[0::4].count(0) == count and data[1::4].count(0) == count


def _fits_f16(data: bytes) -> bool:
    count = len(data) // 4
    values = struct.unpack(f"<{count}f", data)
    try:
        return struct.unpack(f"<{count}e", struct.pack(f"<{count}e", *values)) == values
    except OverflowError:
        return False
