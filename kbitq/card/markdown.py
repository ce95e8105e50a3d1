"""Text from files as Markdown that says no more than the text: the one place that escapes for cards."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from kbitq.text_safety import printable

_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_SPECIAL = re.compile(r"[\\`*_{}\[\]<>()#+!|&~$]")


def inline(text: object) -> str:
    """Any text within a line or a table's cell: no markup, no HTML, one line."""
    return _SPECIAL.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), printable(str(text)))


def code(text: object) -> str:
    """Any text as a code span, also within a table."""
    shown = printable(str(text)).replace("|", "\\|")
    ticks = "`" * (_longest_run(shown) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def fenced(text: str, language: str = "") -> str:
    """A block of code that its text cannot end."""
    shown = printable(text, keep="\n")
    fence = "`" * max(3, _longest_run(shown) + 1)
    return f"{fence}{language}\n{shown}\n{fence}\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; its cells are Markdown already."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def number(value: Any, digits: int, unit: str = "") -> str:
    """A number with so many digits after the point; ``-`` for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}f}{unit}"


def size(value: Any) -> str:
    """Bytes in powers of 1000: ``90.9 MB``; ``-`` for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
