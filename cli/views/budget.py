"""What is shown of a budget: how it was spent, and the curve of error against size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kbitq.cli.views.tables import Length, Table
from kbitq.cli.views.text import decibel_text, share_text, size_text
from kbitq.codecs.base import coding_text

if TYPE_CHECKING:
    from kbitq.checkpoint import Choice

_ROWS = 9  # of the curve
_BAR = 30  # characters of its longest bar


def facts_of(choice: Choice) -> list[tuple[str, str]]:
    """Lines for the summary of a plan."""
    bpw, size = choice.budget.bpw, choice.budget.size
    wanted = f"{bpw:g} bits per weight" if bpw is not None else size_text(size or 0)
    spent = f"{choice.bits_per_weight:.3f} bits per weight, {size_text(choice.weight_bytes)} of weight files"
    lines = [("budget", f"{wanted}: {spent}"), ("expected", f"{decibel_text(choice.sqnr_db)} dB overall")]
    gap = choice.error / choice.bound - 1 if choice.bound > 0 else 0.0
    smallest = "the smallest error that is possible"
    proof = smallest if gap < 5e-6 else f"at most {100 * gap:.2g} % above {smallest}"
    if choice.uniform is not None and choice.uniform_error:
        saved = 100 * (1 - choice.error / choice.uniform_error)
        proof += f"; {saved:.0f} % less than {coding_text(*choice.uniform)} for all"
    lines.append(("choice", proof))
    if choice.feedback_share is not None:
        share, sample = choice.feedback_share
        where = "all weights" if share == 1 else f"{share_text(share, 1.0)} of the weights"
        rows = "all rows" if sample == 1 else f"a sample of {share_text(sample, 1.0)}"
        lines.append(("measured", f"errors of the outputs, with error feedback, of {where} ({rows})"))
    return lines


def curve(choice: Choice) -> Table:
    """The least error at some sizes, from the smallest to the largest, each as a share of that of the smallest."""
    made = Table("bits per weight", "error", "<")
    points = choice.curve
    shown = sorted({round(i * (len(points) - 1) / (_ROWS - 1)) for i in range(_ROWS)})
    for bits, error in (points[i] for i in shown):
        share = error / points[0][1] if points[0][1] else 0.0
        made.add_row(f"{bits:.2f}", f"{100 * share:.3g} %", Length(share, _BAR))
    return made
