"""What ``kbitq calibrate`` made, and what ``kbitq inspect`` shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kbitq.cli.console import console

if TYPE_CHECKING:
    from pathlib import Path

    from kbitq.calibration.calibrate import Calibration
    from kbitq.calibration.statistics import Entry, Statistics


def show_made(made: Calibration) -> None:
    """Print what a run has written."""
    from kbitq.calibration.statistics import Statistics

    statistics = Statistics.open(made.out)
    if console.wants_json:
        console.object({**_about(statistics), "out": str(made.out), "seconds": made.seconds, "notes": made.notes})
        return
    if console.quiet:
        console.data(str(made.out))
        return
    from kbitq.cli.views.tables import facts
    from kbitq.cli.views.text import seconds_text

    rate = made.tokens / max(made.seconds, 1e-9)
    lines = [*_facts(statistics), ("time", f"{seconds_text(made.seconds)} ({rate:.0f} tokens/s)")]
    console.show(facts([("statistics", str(made.out)), *lines]))


def show(path: Path) -> None:
    """Print what a folder of statistics holds: a row for every input, then what it was made from."""
    from kbitq.calibration.statistics import Statistics

    statistics = Statistics.open(path)
    rows = [_row(statistics, entry) for entry in statistics.summary.entries]
    if console.wants_json:
        console.object({**_about(statistics), "hessians": rows})
        return
    from kbitq.cli.views.tables import facts
    from kbitq.cli.views.text import count_text, size_text

    if console.quiet:
        console.data(statistics.fingerprint)
        return
    for row in rows:
        others = f" and {len(row['tensors']) - 1} more" if len(row["tensors"]) > 1 else ""
        experts = f", {row['experts']} experts" if row["experts"] > 1 else ""
        blocks = f" in blocks of {row['block']:,}" if row["block"] else ""
        inputs = "rows" if row["transposed"] else "columns"
        seen = f"{row['columns']:,} {inputs}{blocks}{experts}, {count_text(row['tokens'])} tokens, "
        if row["scarce"]:
            seen += f"too few for {row['scarce']} of them, " if row["experts"] > 1 else "which are too few, "
        console.data(f"{row['tensors'][0]}{others}: {seen}{size_text(row['bytes'])}")
    console.show(facts(_facts(statistics)))


def _row(statistics: Statistics, entry: Entry) -> dict[str, Any]:
    from kbitq.calibration.statistics import entry_nbytes

    return {
        "tensors": list(entry.tensors), "columns": entry.columns, "block": entry.block, "experts": len(entry.tokens),
        "tokens": sum(entry.tokens), "tokens_of_experts": list(entry.tokens), "bytes": entry_nbytes(entry),
        "transposed": entry.transposed, "scarce": sum(tokens < entry.columns for tokens in entry.tokens),
    }  # fmt: skip


def _about(statistics: Statistics) -> dict[str, Any]:
    summary = statistics.summary
    return {
        "fingerprint": statistics.fingerprint, "inputs": len(summary.entries), "weights": len(statistics),
        "bytes": statistics.nbytes, "model": dict(summary.model), "text": dict(summary.text),
        "versions": dict(summary.versions),
    }  # fmt: skip


def _facts(statistics: Statistics) -> list[tuple[str, str]]:
    from kbitq.cli.views.text import size_text

    summary = statistics.summary
    return [
        ("inputs", f"{len(summary.entries)}, of {len(statistics)} weights"),
        ("size", size_text(statistics.nbytes)),
        ("text", f"{_said(summary.text, 'samples')} windows of {_said(summary.text, 'length')} tokens"),
        ("fingerprint", statistics.fingerprint),
    ]


def _said(table: Mapping[str, Any], key: str) -> str:
    return str(table.get(key, "?"))
