"""What a run did, in a screenful: where every weight went, sizes, errors. With --json the whole ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kbitq.cli.console import console
from kbitq.cli.views.tables import Name, facts, reason, table
from kbitq.cli.views.text import count_text, decibel_text, seconds_text, share_text, size_text

if TYPE_CHECKING:
    from kbitq.checkpoint import RunReport

Row = dict[str, Any]


def quantized(report: RunReport) -> None:
    """Of ``quantize``: verdicts, sizes, SQNR, seconds. What was not carried over was said with the plan."""
    if console.wants_json:
        console.object(_ledger(report))
        return
    if not console.quiet:
        lines = [*sizes(report.totals), ("SQNR", sqnr(report.totals))]
        if report.fit_gain_db is not None:
            lines.append(("fitting", f"{report.fit_gain_db:+.2f} dB over the optimal codebooks, on average"))
        lines.append(("time", _time(report)))
        console.show(verdicts(report.tensors), "", facts(lines), "")
    console.data(str(report.out))


def restored(report: RunReport) -> None:
    """Of ``dequantize``: how many tensors, sizes, seconds."""
    notes(report.notes)
    if console.wants_json:
        console.object(_ledger(report))
        return
    if not console.quiet:
        totals = report.totals
        lines = [
            ("tensors", f"{totals['quantized']} dequantized, {totals['kept']} copied"),
            ("size", f"{size_text(totals['bytes_in'])} -> {size_text(totals['bytes_out'])}"),
            ("time", _time(report)),
        ]
        console.show(facts(lines), "")
    console.data(str(report.out))


def notes(sentences: Iterable[str]) -> None:
    """What a reader should know of the source, such as files that were not carried over."""
    for sentence in sentences:
        console.note(sentence)


def outcome(verdict: str, why: str, k: int | None) -> str:
    """The line of the verdict table that a tensor counts under: 'quantized to K=3: matrix', 'kept: norm'."""
    label = f"{verdict} to K={k}" if k else verdict
    return f"{label}: {why}" if why else label


def verdicts(rows: Iterable[Row]) -> Table:
    """A line for each outcome among the rows of a ledger: quantized ones first, then by parameters."""
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    for row in rows:
        label = outcome(row["verdict"], row["reason"], row["k"])
        tensors[label] += 1
        parameters[label] += prod(row["shape"])
    whole = sum(parameters.values())
    made = table("outcome", "tensors", "parameters", "share")
    for label in sorted(tensors, key=lambda label: (label.startswith("kept"), -parameters[label], label)):
        cells = (str(tensors[label]), count_text(parameters[label]), share_text(parameters[label], whole))
        made.add_row(reason(label), *cells)
    return made


def sizes(totals: Row) -> list[tuple[str, str]]:
    """The lines 'size' and 'quantized' of a summary."""
    size = size_text(totals["bytes"])
    if totals["compression"] is not None:
        size = f"{size_text(totals['bytes_in'])} -> {size} ({totals['compression']:.2f}x smaller)"
    lines = [("size", size)]
    if totals["bits_per_weight"] is not None:
        books = size_text(totals["codebook_bytes"])
        lines.append(("quantized", f"{totals['bits_per_weight']:.2f} bits per weight, and {books} of codebooks"))
    return lines


def sqnr(totals: Row) -> Name:
    """'15.53 dB overall, worst 14.20 dB: NAME'. Without the source there is only the average over the weights."""
    if totals["sqnr_db"] is not None:
        lead = f"{decibel_text(totals['sqnr_db'])} dB overall"
    else:
        lead = f"{decibel_text(totals['mean_sqnr_db'])} dB on average"
    worst = totals["worst"]
    if worst is None:
        return Name("", lead)
    return Name(worst["name"], f"{lead}, worst {decibel_text(worst['sqnr_db'])} dB: ")


def _ledger(report: RunReport) -> Row:
    return {"out": str(report.out), "seconds": report.seconds, "totals": report.totals, "tensors": report.tensors}


def _time(report: RunReport) -> str:
    rate = report.totals["bytes_in"] / max(report.seconds, 1e-9)
    return f"{seconds_text(report.seconds)} ({size_text(rate)}/s)"
