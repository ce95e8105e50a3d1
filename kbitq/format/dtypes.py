"""Element types as safetensors spells them, and sizes that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StoredDtype:
    """A dtype of a file.

    Attributes:
        name: in safetensors' spelling.
        bits: per element; 0 for one not known here.
        kind: ``float``, ``int``, ``bool``, ``complex``, or ``opaque``: carried byte for byte, never interpreted.
    """

    name: str
    bits: int
    kind: str


_DTYPES = {
    **{n: StoredDtype(n, b, "float") for n, b in (("F64", 64), ("F32", 32), ("F16", 16), ("BF16", 16))},
    **{n: StoredDtype(n, int(n[1:]), "int") for n in ("I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8")},
    **{n: StoredDtype(n, 8, "opaque") for n in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")},
    **{n: StoredDtype(n, b, "opaque") for n, b in (("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4))},
    "BOOL": StoredDtype("BOOL", 8, "bool"),
    "C64": StoredDtype("C64", 64, "complex"),
}


def stored_dtype(name: str) -> StoredDtype:
    """The facts about a dtype; an unknown name gives an opaque dtype of 0 bits."""
    known = _DTYPES.get(name)
    return known if known is not None else StoredDtype(name, 0, "opaque")


def element_count(shape: Sequence[int]) -> int:
    """Number of elements of a tensor of this shape (1 for a scalar)."""
    return math.prod(shape)


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor, or None where the dtype is unknown or the elements do not fill whole bytes."""
    per_element = stored_dtype(dtype).bits
    bits = per_element * element_count(shape)
    return bits // 8 if per_element and bits % 8 == 0 else None


def is_shape(value: Any) -> bool:
    """Whether a parsed JSON value is a list of non-negative integers."""
    return isinstance(value, list) and all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in value)
