"""What a run did, in a screenful: where every weight went, sizes, errors. With --json the whole ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from kbitq.cli.console import console
from kbitq.cli.views.tables import Name, Table, Words, facts
from kbitq.cli.views.text import count_text, decibel_text, seconds_text, share_text, size_text
from kbitq.codecs.base import coding_text
from kbitq.format import DEFAULT_CODEC

if TYPE_CHECKING:
    from kbitq.checkpoint import RunReport

Row = Mapping[str, Any]
_BY_RULE = "rule "  # how the reason of a tensor begins that a rule decided on
_FEW_RULES = 3  # of one outcome, that have a line each; a recipe may have one for each tensor


def quantized(report: RunReport) -> None:
    """Of ``quantize``: verdicts, sizes, SQNR, seconds. What was not carried over was said with the plan."""
    if console.wants_json:
        console.object(_ledger(report))
        return
    if not console.quiet:
        lines: list[tuple[str, Any]] = [*sizes(report.totals), *sqnr(report.totals)]
        if report.fit_gain_db is not None:
            lines.append(("fitting", f"{report.fit_gain_db:+.2f} dB over the optimal codebooks, on average"))
        if any(report.reused):
            lines.append(("reused", _reused(report)))
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


def outcome(verdict: str, why: str, k: int | None, codec: str = DEFAULT_CODEC) -> str:
    """The line of the verdict table that a tensor counts under: 'quantized to K=3: matrix', 'kept: norm'."""
    label = f"{verdict} to {coding_text(codec, k)}" if k else verdict
    return f"{label}: {why}" if why else label


def verdicts(rows: Iterable[Row]) -> Table:
    """A line for each outcome among the rows of a ledger: quantized ones first, then by parameters."""
    rows = list(rows)
    rules = _rules(rows)
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    for row in rows:
        codec = row.get("codec", DEFAULT_CODEC)
        count = len(rules[row["verdict"], row["k"], codec])
        many = count > _FEW_RULES and row["reason"].startswith(_BY_RULE)
        label = outcome(row["verdict"], f"{count} rules" if many else row["reason"], row["k"], codec)
        tensors[label] += 1
        parameters[label] += prod(row["shape"])
    whole = sum(parameters.values())
    made = Table("outcome", "tensors", "parameters", "share")
    for label in sorted(tensors, key=lambda label: (label.startswith("kept"), -parameters[label], label)):
        cells = (str(tensors[label]), count_text(parameters[label]), share_text(parameters[label], whole))
        made.add_row(Words(label), *cells)
    return made


def _rules(rows: Iterable[Row]) -> dict[tuple[str, int | None, str], set[str]]:
    """The rules that decided, by what they came to."""
    found: dict[tuple[str, int | None, str], set[str]] = defaultdict(set)
    for row in rows:
        if row["reason"].startswith(_BY_RULE):
            found[row["verdict"], row["k"], row.get("codec", DEFAULT_CODEC)].add(row["reason"])
    return found


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


def sqnr_kind(totals: Row) -> tuple[str, str]:
    """What the error of all tensors is called, and its key: overall, or the mean where only the tensors' are known."""
    return ("SQNR", "sqnr_db") if totals["sqnr_db"] is not None else ("mean SQNR", "mean_sqnr_db")


def sqnr(totals: Row) -> list[tuple[str, Name]]:
    """'SQNR  15.53 dB overall, worst 14.20 dB: NAME'; without the source 'mean SQNR  15.52 dB by tensor, worst ...'."""
    label, key = sqnr_kind(totals)
    lead = f"{decibel_text(totals[key])} dB {'overall' if key == 'sqnr_db' else 'of the tensors'}"
    worst = totals["worst"]
    if worst is None:
        return [(label, Name("", lead))]
    return [(label, Name(worst["name"], f"{lead}, worst {decibel_text(worst['sqnr_db'])} dB: "))]


def _reused(report: RunReport) -> str:
    """What of an interrupted run was gone on from."""
    (written, scanned), whole = report.reused, len(report.tensors)
    done = f"{written} of {whole} tensors were written" if written else f"{scanned} of {whole} tensors were scanned"
    return f"{done} by the interrupted run"


def _ledger(report: RunReport) -> Row:
    return {"out": str(report.out), "seconds": report.seconds, "totals": report.totals, "tensors": report.tensors}


def _time(report: RunReport) -> str:
    rate = report.totals["bytes_in"] / max(report.seconds, 1e-9)
    return f"{seconds_text(report.seconds)} ({size_text(rate)}/s)"
