"""Numbers that go with blocks of a weight: scales, zero points, biases. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scales:
    """Which numbers go with an element: those of its block of ``rows`` rows (of one matrix) and ``cols`` columns.

    Attributes:
        name: the stored tensor.
        rows: of a block.
        cols: of a block.
        kind: how it is stored: ``float``, ``e8m0``, ``e4m3`` (``tables.scales``), or ``stream``: zero points of
            ``bits`` bits, a dense stream down each column of ``[out, groups]``.
        divisor: a stored tensor of one element that these are divided by; empty: none.
        factor: one that they are multiplied with.
        bits: of ``stream``.
    """

    name: str
    rows: int
    cols: int
    kind: str = "float"
    divisor: str = ""
    factor: str = ""
    bits: int = 0
