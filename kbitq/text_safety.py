"""Strings from files and paths made safe to show: no character of theirs may drive a terminal or forge a line.

Imports nothing of kbitq, so that any module may use it. Errors (``kbitq.errors``), everything that the command line
prints (``kbitq.cli.console``), the page of ``inspect --html`` and the model card go through here.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

LONGEST_NAME = 200
_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # they turn the rest of a line around


def printable(text: str, keep: str = "") -> str:
    """``text`` with everything that is not a visible character or a blank written as an escape, but for ``keep``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def prose(text: str) -> str:
    """Running text in any script, lines and tabs kept; only what could drive a terminal is written as an escape."""
    return "".join(_escaped(c) if _commands(c) and c not in "\n\t" else c for c in text)


def shown(name: object) -> str:
    """A name as a message has it: printable, quotes and backslashes escaped, and not longer than a line."""
    text = json.dumps(str(name), ensure_ascii=False)[1:-1]
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 3] + "..."


def all_printable(value: Any) -> Any:
    """JSON-like ``value`` with every string in it, keys too, printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {all_printable(key): all_printable(item) for key, item in value.items()}
    return [all_printable(item) for item in value] if isinstance(value, list | tuple) else value


def _commands(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _BIDI


def _escaped(c: str) -> str:
    return c.encode("unicode_escape").decode()
