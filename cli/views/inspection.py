"""The tables of ``kbitq inspect``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from kbitq.cli.console import console
from kbitq.cli.views import differences, looks, summary
from kbitq.cli.views.tables import Name, Table, facts
from kbitq.cli.views.text import decibel_text, natural_key, shape_text, size_text
from kbitq.format import DEFAULT_CODEC

if TYPE_CHECKING:
    from kbitq.checkpoint import InspectReport
    from kbitq.report.usage import Usage

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Look:
    """What of a quantized checkpoint is shown: grouped ``by``, the ``worst`` only, counts, another to compare with."""

    by: str = "tensor"
    worst: int | None = None
    counted: dict[str, Usage] | None = None
    other: InspectReport | None = None


_HOW = ("codec", "scale", "codebook")  # a row without a codec has the default one
_GUIDES = {"calibrated": "by error feedback with the statistics", "importance": "by weights of their columns from"}
_FINGERPRINT = 12  # digits of it that are shown


def show(report: InspectReport, sort: str, ks: Sequence[int], look: Look) -> None:
    """Print a report of ``kbitq.checkpoint.inspect``: as JSON if asked for, else as tables."""
    tensors = _sorted(report.tensors, sort, min(ks))
    extra = _extra(report, look) if report.quantized else {}
    if look.worst is not None:
        from kbitq.report.groups import worst

        tensors = worst(report.tensors, look.worst)
    if console.wants_json:
        console.object({"totals": report.totals, "tensors": tensors, **extra})
        return
    summary.notes(report.notes)
    if not report.quantized:
        _show_foreseen(report, tensors, ks)
    elif look.other is not None:
        shown = "diff_groups" in extra and differences.by_group(extra["diff_groups"], look.by)
        lines = facts(differences.totals(report.totals, look.other.totals))
        console.show(shown or differences.by_tensor(_most_lost(extra["diff"], look.worst)), "", lines)
    elif "groups" in extra:
        console.show(looks.groups_table(extra["groups"], look.by), "")
        if look.worst is None:
            console.show(*_overall(report))
        else:
            _show_measured(report, tensors)
    else:
        _show_measured(report, tensors)
    if look.counted is not None:
        console.show("", looks.histograms_table(look.counted))


def _most_lost(rows: Sequence[Row], count: int | None) -> Sequence[Row]:
    """The ``count`` tensors whose SQNR falls most, or all."""
    if count is None:
        return rows
    known = [row for row in rows if row["more_db"] is not None]
    return sorted(known, key=lambda row: (row["more_db"], natural_key(row["name"])))[:count]


def _extra(report: InspectReport, look: Look) -> dict[str, Any]:
    """What a look adds to totals and tensors."""
    from kbitq.report.difference import difference
    from kbitq.report.groups import by_layer, by_role

    found: dict[str, Any] = {}
    if look.other is not None:
        found["diff"] = difference(report.tensors, look.other.tensors)
        found["other_totals"] = look.other.totals
    if look.by != "tensor":
        grouped = by_layer if look.by == "layer" else by_role
        found["groups"] = grouped(report.tensors)
        if look.other is not None:
            found["diff_groups"] = differences.joined(found["groups"], grouped(look.other.tensors))
    if look.counted is not None:
        found["histograms"] = {name: usage.to_json() for name, usage in look.counted.items()}
    return found


def _sorted(tensors: Sequence[Row], by: str, k: int) -> list[Row]:
    """Tensors without a measurement come after the others when sorted by SQNR."""

    def error(row: Row) -> float:
        value = row["sqnr_db"] if "would" not in row else (row["would"] or {}).get(k, {}).get("sqnr_db")
        return float("inf") if value is None else value

    keys: dict[str, Callable[[Row], Any]] = {
        "name": lambda row: natural_key(row["name"]),
        "sqnr": lambda row: (error(row), natural_key(row["name"])),
        "size": lambda row: (-row["bytes"], natural_key(row["name"])),
    }
    return sorted(tensors, key=keys[by])


def measured(rows: Sequence[Row], mixed: Sequence[str]) -> Table:
    """A line for each quantized tensor. ``mixed``: which of scale rule and codebook have a column."""
    made = Table("tensor", "shape", "K", "bits", "SQNR dB", "max error", "size", *(f"<{key}" for key in mixed))
    for row in rows:
        made.add_row(
            Name(row["name"]),
            shape_text(row["shape"]),
            str(row["k"]),
            f"{row['bits_per_weight']:.2f}",
            decibel_text(inf if row["max_abs_err"] == 0 else row["sqnr_db"]),
            "-" if row["max_abs_err"] is None else f"{row['max_abs_err']:.2e}",
            size_text(row["bytes"]),
            *(row.get(key, DEFAULT_CODEC) for key in mixed),
        )
    return made


def _show_measured(report: InspectReport, tensors: Sequence[Row]) -> None:
    rows = [row for row in tensors if row["verdict"] == "quantized"]
    console.show(measured(rows, _mixed(report)), "", *_overall(report))


def _mixed(report: InspectReport) -> list[str]:
    """Which of codec, scale rule and codebook differ from tensor to tensor."""
    rows = [row for row in report.tensors if row["verdict"] == "quantized"]
    return [key for key in _HOW if len({row.get(key, DEFAULT_CODEC) for row in rows}) > 1]


def _overall(report: InspectReport) -> list[Any]:
    """What follows the tensors: the verdicts, and the totals."""
    lines: list[tuple[str, Any]] = list(summary.sizes(report.totals))
    mixed = _mixed(report)
    first = next((row for row in report.tensors if row["verdict"] == "quantized"), None)
    told: Mapping[str, Any] = dict(first or {})
    same = ", ".join(f"{key} {told[key]}" for key in _HOW if key not in mixed and key in told)
    if same:
        lines.append(("chosen by", same))
    lines += [line for key in _GUIDES for line in _guided(report, key)]
    lines += summary.sqnr(report.totals)
    return [summary.verdicts(report.tensors), "", facts(lines)]


def _guided(report: InspectReport, key: str) -> list[tuple[str, str]]:
    """How many tensors were quantized with a calibration, or with importance, and its fingerprint."""
    rows: list[Mapping[str, Any]] = [row for row in report.tensors if row["verdict"] == "quantized"]
    found = [str(row[key]) for row in rows if key in row]
    if not found:
        return []
    count = "all tensors" if len(found) == len(rows) else f"{len(found)} of {len(rows)} tensors"
    return [(key, f"{count}, {_GUIDES[key]} {found[0][:_FINGERPRINT]}...")]


def foreseen(rows: Sequence[Row], ks: Sequence[int]) -> Table:
    """A line for each tensor of an ordinary checkpoint: the SQNR that each K would give."""
    mixed = [key for key in ("dtype",) if len({row[key] for row in rows}) > 1]
    made = Table("tensor", "shape", *(f"<{key}" for key in mixed), *(f"K={k}" for k in ks))
    for row in rows:
        expected = (decibel_text(row["would"][k]["sqnr_db"]) for k in ks)
        made.add_row(Name(row["name"]), shape_text(row["shape"]), *(row[key] for key in mixed), *expected)
    return made


def _show_foreseen(report: InspectReport, tensors: Sequence[Row], ks: Sequence[int]) -> None:
    rows = [row for row in tensors if row["would"]]
    verdicts = summary.verdicts(map(_intent, tensors))
    console.show(foreseen(rows, ks), "", verdicts, "", choices(report.totals, ks))


def _intent(row: Row) -> Row:
    """The row as the table of verdicts shall count it: nothing has been quantized yet."""
    if row["verdict"] != "quantized":
        return row
    return {**row, "verdict": "to quantize"} if row["would"] else {**row, "verdict": "cannot", "reason": "NaN or Inf"}


def choices(totals: Row, ks: Sequence[int]) -> Table:
    """A line for each K: what the whole checkpoint would come to."""
    made = Table("K", "bits per weight", "SQNR dB", "file size", "smaller")
    for k in ks:
        would = totals["would"][k]
        smaller = f"{totals['bytes'] / max(would['bytes'], 1):.2f}x"
        cells = (f"{would['bits_per_weight']:.2f}", decibel_text(would["sqnr_db"]), size_text(would["bytes"]), smaller)
        made.add_row(str(k), *cells)
    return made
