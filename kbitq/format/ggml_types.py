"""ggml's tensor types: their numbers, values and bytes of a block (ggml.h, ggml-common.h). Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """A type of ggml.

    Attributes:
        name: as llama.cpp writes it.
        number: in files.
        values: of a block.
        nbytes: of a block.
        plain: the dtype of the elements in safetensors' spelling, where they are no blocks.
    """

    name: str
    number: int
    values: int
    nbytes: int
    plain: str | None = None

    def size(self, shape: Sequence[int]) -> int | None:
        """Bytes of a tensor, or None where its rows are no whole blocks."""
        if shape[-1] % self.values:
            return None
        return math.prod(shape) // self.values * self.nbytes


_BLOCKS = (
    ("Q4_0", 2, 32, 18),
    ("Q4_1", 3, 32, 20),
    ("Q5_0", 6, 32, 22),
    ("Q5_1", 7, 32, 24),
    ("Q8_0", 8, 32, 34),
    ("Q2_K", 10, 256, 84),
    ("Q3_K", 11, 256, 110),
    ("Q4_K", 12, 256, 144),
    ("Q5_K", 13, 256, 176),
    ("Q6_K", 14, 256, 210),
    ("Q8_K", 15, 256, 292),
    ("IQ2_XXS", 16, 256, 66),
    ("IQ2_XS", 17, 256, 74),
    ("IQ3_XXS", 18, 256, 98),
    ("IQ1_S", 19, 256, 50),
    ("IQ4_NL", 20, 32, 18),
    ("IQ3_S", 21, 256, 110),
    ("IQ2_S", 22, 256, 82),
    ("IQ4_XS", 23, 256, 136),
    ("IQ1_M", 29, 256, 56),
    ("TQ1_0", 34, 256, 54),
    ("TQ2_0", 35, 256, 66),
    ("MXFP4", 39, 32, 17),
    ("NVFP4", 40, 64, 36),
)
_PLAIN = (
    ("F32", 0, 4, "F32"),
    ("F16", 1, 2, "F16"),
    ("I8", 24, 1, "I8"),
    ("I16", 25, 2, "I16"),
    ("I32", 26, 4, "I32"),
    ("I64", 27, 8, "I64"),
    ("F64", 28, 8, "F64"),
    ("BF16", 30, 2, "BF16"),
)
TYPES = (
    *(GgmlType(name, number, 1, nbytes, plain) for name, number, nbytes, plain in _PLAIN),
    *(GgmlType(*block) for block in _BLOCKS),
)
BY_NUMBER = {t.number: t for t in TYPES}
BY_NAME = {t.name: t for t in TYPES}
