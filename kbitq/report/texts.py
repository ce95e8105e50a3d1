"""Numbers as the page writes them. A number that is not there is a dash, never a NaN."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def decibels(row: Row) -> str:
    """The SQNR of a row: ``15.53 dB``, ``exact`` where nothing was lost."""
    if row["sqnr_db"] is None:
        return "exact" if row.get("max_abs_err") == 0 else "-"
    return f"{row['sqnr_db']:.2f} dB"


def signed_decibels(value: float | None) -> str:
    """A difference in dB, with its sign."""
    return "-" if value is None else f"{value:+.2f} dB"


def size(count: float) -> str:
    """Bytes in powers of 1000."""
    sign, count = "-" if count < 0 else "", abs(count)
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{sign}{count:.3g} {unit}"
        count /= 1000
    return f"{sign}{count:.3g} TB"


def ks(values: list[int]) -> str:
    """The K of some tensors: ``3``, or the smallest and the largest."""
    return str(values[0]) if len(values) == 1 else f"{values[0]}\N{EN DASH}{values[-1]}" if values else "-"
