"""What ``inspect --diff`` shows: two quantizations of one source, by tensor, by role or by layer, and in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kbitq.cli.views import summary
from kbitq.cli.views.tables import Name, Table
from kbitq.cli.views.text import decibel_text, size_text

Row = Mapping[str, Any]


def by_tensor(rows: Sequence[Row]) -> Table:
    """What changes from the first quantization to the second; tensors that are alike are counted only."""
    made = Table("tensor", "K", "SQNR dB", "gain", "size", "more")
    changed = [row for row in rows if row["more_bytes"] or row["more_db"] or row["k"][0] != row["k"][1]]
    for row in changed:
        made.add_row(
            Name(row["name"]), _arrow(*("kept" if k is None else str(k) for k in row["k"])),
            _arrow(*map(decibel_text, row["sqnr_db"])), _gain(row), _arrow(*map(size_text, row["bytes"])), _more(row),
        )  # fmt: skip
    if alike := len(rows) - len(changed):
        made.add_row(f"{alike} tensor{'s' if alike > 1 else ''} alike", *[""] * 5)
    return made


def joined(first: Sequence[Row], second: Sequence[Row]) -> list[dict[str, Any]]:
    """Groups of two inspections side by side; what a side does not have, as it keeps those tensors, is None."""
    a, b = ({group["group"]: group for group in groups} for groups in (first, second))
    rows = []
    for name in dict.fromkeys([*a, *b]):
        sides = [a.get(name), b.get(name)]
        row: dict[str, Any] = {"group": name}
        for key in ("ks", "bits_per_weight", "bytes", "sqnr_db"):
            row[key] = [side and side[key] for side in sides]
        row["more_bytes"], row["more_db"] = _difference(row["bytes"]), _difference(row["sqnr_db"])
        rows.append(row)
    return rows


def by_group(rows: Sequence[Row], title: str) -> Table:
    """A line for each row of ``joined``."""
    made = Table(title, "K", "bits", "SQNR dB", "gain", "size", "more")
    for row in rows:
        bits = ("-" if value is None else f"{value:.2f}" for value in row["bits_per_weight"])
        sizes = ("-" if value is None else size_text(value) for value in row["bytes"])
        made.add_row(
            Name(row["group"]), _arrow(*("kept" if ks is None else ", ".join(map(str, ks)) for ks in row["ks"])),
            _arrow(*bits), _arrow(*map(decibel_text, row["sqnr_db"])), _gain(row), _arrow(*sizes), _more(row),
        )  # fmt: skip
    return made


def totals(first: Row, second: Row) -> list[tuple[str, str]]:
    """Size, bits and error of both, for ``facts``."""
    more = {"more_bytes": second["bytes"] - first["bytes"]}
    lines = [("size", f"{_arrow(size_text(first['bytes']), size_text(second['bytes']))} ({_more(more)})")]
    bits = [total["bits_per_weight"] for total in (first, second)]
    if None not in bits:
        lines.append(("quantized", f"{_arrow(*(f'{value:.2f}' for value in bits))} bits per weight"))
    label, key = summary.sqnr_kind(first)
    errors = [first[key], second[key]]
    if None not in errors:
        gain = _gain({"more_db": _difference(errors)})
        lines.append((label, f"{_arrow(*map(decibel_text, errors))} dB ({gain})"))
    return lines


def _difference(pair: Sequence[float | None]) -> float | None:
    first, second = pair
    return None if first is None or second is None else second - first


def _gain(row: Row) -> str:
    return "-" if row["more_db"] is None else f"{row['more_db']:+.2f}"


def _more(row: Row) -> str:
    more = row["more_bytes"]
    return "-" if more is None else f"{'-' if more < 0 else '+'}{size_text(abs(more))}"


def _arrow(a: str, b: str) -> str:
    return a if a == b else f"{a} -> {b}"
