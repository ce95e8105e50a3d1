"""Two quantizations of one source, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kbitq.errors import CheckpointError

Row = Mapping[str, Any]


def difference(a: Sequence[Row], b: Sequence[Row]) -> list[Row]:
    """What each tensor is in the rows of two inspections: K, bytes and SQNR of both, and how much they differ.

    Raises CheckpointError unless both have the same tensors, so that they can be of one source.
    """
    first, second = ({r["name"]: r for r in rows} for rows in (a, b))
    for name in [*first, *second]:
        for one, other in ((first, second), (second, first)):
            if name in one and (name not in other or list(other[name]["shape"]) != list(one[name]["shape"])):
                raise CheckpointError(f"tensor {name} is not the same in both: they are not made from one source")
    return [_compared(first[name], second[name]) for name in first]


def _compared(a: Row, b: Row) -> Row:
    both = a["sqnr_db"] is not None and b["sqnr_db"] is not None
    return {
        "name": a["name"], "shape": list(a["shape"]), "k": [a["k"], b["k"]], "bytes": [a["bytes"], b["bytes"]],
        "sqnr_db": [a["sqnr_db"], b["sqnr_db"]], "codebook": [a["codebook"], b["codebook"]],
        "scale": [a["scale"], b["scale"]], "more_bytes": b["bytes"] - a["bytes"],
        "more_db": b["sqnr_db"] - a["sqnr_db"] if both else None,
    }  # fmt: skip
