"""More ways to look at a quantized checkpoint: groups over depth, and counts of scale bytes and levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kbitq.cli.views.tables import Bars, Cell, Name, Table
from kbitq.cli.views.text import count_text, decibel_text, share_text, size_text

if TYPE_CHECKING:
    from kbitq.report.usage import Usage

Row = Mapping[str, Any]


def groups_table(groups: Sequence[Row], title: str) -> Table:
    """A line for each group; SQNR over depth as bars between the lowest and the highest of all groups."""
    deep = [v for g in groups for v in g["over_depth"].values() if v is not None and len(g["over_depth"]) > 1]
    made = Table(title, "tensors", "parameters", "K", "bits", "size", "SQNR dB", "worst")
    if deep:
        made.add_column("<by depth")
    for group in groups:
        worst = group["worst"]["sqnr_db"] if group["worst"] else None
        cells: list[str | Cell] = [
            str(group["tensors"]), count_text(group["parameters"]), ", ".join(map(str, group["ks"])),
            f"{group['bits_per_weight']:.2f}", size_text(group["bytes"]), decibel_text(group["sqnr_db"]),
            decibel_text(worst),
        ]  # fmt: skip
        if deep:
            values = list(group["over_depth"].values())
            cells.append(Bars(values, (min(deep), max(deep))) if len(values) > 1 else "")
        made.add_row(Name(group["group"]), *cells)
    return made


def histograms_table(found: dict[str, Usage]) -> Table:
    """Scale bytes of all blocks, and the use of the levels of each K, as bars."""
    import numpy as np

    scales = np.sum([usage.scales for usage in found.values()], axis=0)
    first, last = (int(i) for i in scales.nonzero()[0][[0, -1]])
    made = Table("histogram", "<", "<")
    ends = f"bytes {first} to {last}; {share_text(int(scales[0]), int(scales.sum()))} of the blocks are 0"
    made.add_row("scale bytes", Bars(scales[first : last + 1].tolist()), ends)
    for k in sorted({usage.indices.size.bit_length() - 1 for usage in found.values()}):
        indices = np.sum([u.indices for u in found.values() if u.indices.size == 1 << k], axis=0)
        rarest = share_text(int(indices.min()), int(indices.sum()))
        made.add_row(f"levels, K={k}", Bars(indices.tolist()), f"the rarest level has {rarest} of the weights")
    return made
