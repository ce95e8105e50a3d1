"""What the page says in words and numbers: the terms at its top, how a checkpoint was made, what was evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kbitq.checkpoint.plan.totals import codec_of
from kbitq.report.charts import overall
from kbitq.report.side import Side
from kbitq.report.texts import ks, size


class Fact(NamedTuple):
    """A term and its value; ``note`` stands small beside it."""

    term: str
    value: str
    note: str = ""


def facts(side: Side) -> list[Fact]:
    """The numbers at the top."""
    totals, (decibels, measured) = side.report.totals, overall(side)
    before, after = totals["bytes_in"], totals["bytes"]
    found = [
        Fact("Size", size(after), f"from {size(before)}" if before else ""),
        Fact("Compression", f"{before / after:.2f} ×" if before and after else "-"),
        Fact("Bits per weight", f"{totals['bits_per_weight']:.2f}", f"K = {ks(sorted({r['k'] for r in side.rows}))}"),
        Fact("Coverage", f"{100 * totals['coverage']:.0f} %", "of the parameters"),
        Fact("SQNR", "-" if decibels is None else f"{decibels:.2f} dB", "" if measured else "average of the tensors"),
    ]
    if side.evaluations:
        last = side.evaluations[-1]
        compared = last.get("against")
        note = f"source {compared['reference_perplexity']:.2f}" if compared else ""
        found.append(Fact("Perplexity", f"{last['perplexity']:.2f}", note))
        if compared:
            found.append(Fact("KL divergence", f"{compared['kl_mean']:.4f}", "nats"))
    return found


def compared_facts(a: Side, b: Side) -> list[tuple[str, str, str, str]]:
    """The same of two checkpoints: term, both values, and how much the second differs where that is a number."""
    first, second = facts(a), {fact.term: fact for fact in facts(b)}
    changes = _changes(a, b)
    return [(f.term, f.value, second[f.term].value, changes.get(f.term, "")) for f in first if f.term in second]


def _changes(a: Side, b: Side) -> dict[str, str]:
    one, two = a.report.totals, b.report.totals
    changes = {
        "Size": _signed(two["bytes"] - one["bytes"], size),
        "Bits per weight": f"{two['bits_per_weight'] - one['bits_per_weight']:+.2f}",
        "Coverage": f"{100 * (two['coverage'] - one['coverage']):+.0f} %",
    }
    decibels = overall(a)[0], overall(b)[0]
    if decibels[0] is not None and decibels[1] is not None:
        changes["SQNR"] = f"{decibels[1] - decibels[0]:+.2f} dB"
    if a.evaluations and b.evaluations and _text(a) == _text(b):
        changes["Perplexity"] = f"{b.evaluations[-1]['perplexity'] - a.evaluations[-1]['perplexity']:+.2f}"
    return changes


def _signed(value: float, text: Any) -> str:
    return f"+{text(value)}" if value > 0 else str(text(value))


def _text(side: Side) -> tuple[Any, ...]:
    last = side.evaluations[-1]
    return last["text"]["sha256"], last["windows"], last["window"]


def origin(side: Side) -> list[tuple[str, str, bool]]:
    """How a checkpoint was made, as far as it is known: term, value, and whether the value is code."""
    said = {what: ", ".join(sorted({str(r[what]) for r in side.rows})) for what in ("scale", "codebook")}
    found = [
        ("Source", side.source or "not recorded", bool(side.source)),
        ("Command", side.command or "not recorded: a single file holds its tensors' options only", bool(side.command)),
        ("Recipe", _recipe(side.ledger), False),
        ("Version", f"kbitq {side.ledger['kbitq']}" if side.ledger.get("kbitq") else "not recorded", False),
        ("Codec", ", ".join(sorted({codec_of(r) for r in side.rows})), False),
        ("Codebook", said["codebook"], False),
        ("Scale rule", said["scale"], False),
    ]
    files = side.ledger.get("files")
    for entry in files if isinstance(files, list) else []:
        if isinstance(entry, Mapping):
            digest = str(entry.get("sha256"))[:16]
            found.append((str(entry.get("option")).capitalize(), f"{entry.get('name')}, SHA-256 {digest}…", False))
    return found


def _recipe(ledger: Mapping[str, Any]) -> str:
    options = ledger.get("options")
    rules = options.get("rule") if isinstance(options, Mapping) else None
    if isinstance(ledger.get("recipe"), str):
        count = len(rules) if isinstance(rules, list) else 0
        return f"{ledger['recipe']}, {count} rules, beside the weights"
    return "; ".join(map(str, rules)) if isinstance(rules, list) and rules else "none"


EVALUATION_HEAD = ("Text", "Windows", "Perplexity", "Source", "KL mean", "KL 99 %", "Same top token")


def evaluations(sides: Sequence[Side]) -> list[tuple[str, ...]]:
    """A row for each saved result; the divergences are in nats."""
    rows: list[tuple[str, ...]] = []
    for side in sides:
        for found in side.evaluations:
            compared = found.get("against")
            cells = ("-", "-", "-", "-")
            if compared:
                kl_mean, kl_p99 = (f"{compared[key]:.4f}" for key in ("kl_mean", "kl_p99"))
                same = f"{100 * compared['same_top1']:.1f} %"
                cells = (f"{compared['reference_perplexity']:.3f}", kl_mean, kl_p99, same)
            windows = f"{found['windows']} × {found['window']}"
            named = found["text"]["name"] if len(sides) == 1 else f"{side.key}: {found['text']['name']}"
            rows.append((named, windows, f"{found['perplexity']:.3f}", *cells))
    return rows


TASK_HEAD = ("Task", "Shots", "Samples", "Metric", "Value", "Standard error", "Source")


def tasks(sides: Sequence[Side]) -> list[tuple[str, ...]]:
    """A row for each metric of each task."""
    rows: list[tuple[str, ...]] = []
    for side in sides:
        for found in side.tasks:
            named = found["task"] if len(sides) == 1 else f"{side.key}: {found['task']}"
            figures = (f"{found[key]:.4f}" if key in found else "-" for key in ("value", "stderr", "against"))
            rows.append((named, str(found["shots"]), str(found["samples"]), found["metric"], *figures))
    return rows


def kept(side: Side) -> list[tuple[str, int]]:
    """Reasons to keep tensors, and how many there are for each."""
    counts: dict[str, int] = {}
    for row in side.kept:
        reason = row["reason"] or "no reason given"
        counts[reason] = counts.get(reason, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
