"""More ways to look at a quantized checkpoint: groups, depth, worst tensors, histograms, differences, a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbitq.cli.console import console

if TYPE_CHECKING:
    from rich.table import Table

    from kbitq.checkpoint.source.storage import Storage
    from kbitq.report.usage import Usage

Row = dict[str, Any]
_WIDTH = 64  # characters of a histogram


def groups_table(groups: Sequence[Row], title: str) -> Table:
    """A line for each group; SQNR over depth as bars between the lowest and the highest of all groups."""
    from kbitq.cli.views.tables import Name, table
    from kbitq.cli.views.text import count_text, decibel_text, size_text
    from kbitq.report.groups import sparkline

    deep = [v for g in groups for v in g["over_depth"].values() if v is not None and len(g["over_depth"]) > 1]
    columns = [title, "tensors", "parameters", "K", "bits", "size", "SQNR dB", "worst"]
    made = table(*columns, *(["<SQNR over depth"] if deep else []))
    for group in groups:
        worst = group["worst"]["sqnr_db"] if group["worst"] else None
        ks = ", ".join(map(str, group["ks"]))
        cells = [
            str(group["tensors"]), count_text(group["parameters"]), ks, f"{group['bits_per_weight']:.2f}",
            size_text(group["bytes"]), decibel_text(group["sqnr_db"]), decibel_text(worst),
        ]  # fmt: skip
        if deep:
            values = list(group["over_depth"].values())
            cells.append(sparkline(values, min(deep), max(deep)) if len(values) > 1 else "")
        made.add_row(Name(group["group"]), *cells)
    return made


def difference_table(rows: Sequence[Row]) -> Table:
    """What changes from the first quantization to the second; tensors that are alike are counted only."""
    from kbitq.cli.views.tables import Name, table
    from kbitq.cli.views.text import decibel_text, size_text

    made = table("tensor", "K", "SQNR dB", "gain", "size", "more")
    alike = 0
    for row in rows:
        if not row["more_bytes"] and not row["more_db"] and row["k"][0] == row["k"][1]:
            alike += 1
            continue
        gain = "-" if row["more_db"] is None else f"{row['more_db']:+.2f}"
        sign = "-" if row["more_bytes"] < 0 else "+"
        made.add_row(
            Name(row["name"]), _arrow(*("kept" if k is None else str(k) for k in row["k"])),
            _arrow(*map(decibel_text, row["sqnr_db"])), gain, _arrow(*map(size_text, row["bytes"])),
            f"{sign}{size_text(abs(row['more_bytes']))}",
        )  # fmt: skip
    if alike:
        made.add_row(f"{alike} tensors alike", *[""] * 5)
    return made


def _arrow(a: str, b: str) -> str:
    return a if a == b else f"{a} -> {b}"


def histograms_table(found: dict[str, Usage]) -> Table:
    """Scale bytes of all blocks, and the use of the levels of each K, as bars."""
    from kbitq.cli.views.tables import table
    from kbitq.cli.views.text import share_text

    scales = sum(usage.scales for usage in found.values())
    blocks = int(scales.sum())
    first, last = (int(i) for i in scales.nonzero()[0][[0, -1]])
    made = table("histogram", "<", "<")
    ends = f"bytes {first} to {last}; {share_text(int(scales[0]), blocks)} of the blocks are 0"
    made.add_row("scale bytes", _bars(scales[first : last + 1].tolist()), ends)
    for k in sorted({usage.indices.size.bit_length() - 1 for usage in found.values()}):
        indices = sum(u.indices for u in found.values() if u.indices.size == 1 << k)
        rarest = share_text(int(indices.min()), int(indices.sum()))
        made.add_row(f"levels, K={k}", _bars(indices.tolist()), f"the rarest level has {rarest} of the weights")
    return made


def _bars(counts: Sequence[int]) -> str:
    """Counts as bars, neighbours added up where there are too many."""
    from kbitq.report.groups import sparkline

    step = -(-len(counts) // _WIDTH)
    summed = [sum(counts[i : i + step]) for i in range(0, len(counts), step)]
    return sparkline(summed, 0, max(summed))


def counted(place: Path | Storage) -> dict[str, Usage]:
    """The use of scale bytes and levels in every tensor."""
    from kbitq.checkpoint.written.stored import open_quantized
    from kbitq.report.usage import usage

    opened = open_quantized(place)
    with console.progress("counting") as progress:
        return usage(opened, list(opened.tensors), None, progress)
