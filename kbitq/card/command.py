"""The command line that a ledger's options come from."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

# What is the default is left out.
_DEFAULTS = (("scale", "mse"), ("codebook", "optimal"), ("on_nonfinite", "error"), ("keep_embeddings", True))
_IN_A_RECIPE = frozenset((
    "k", "scale", "codebook", "codec", "scale_block", "include", "exclude", "only", "keep_embeddings", "on_nonfinite",
    "max_shard_size", "rule", "format", "group",
))  # fmt: skip
_FILES = ("importance", "calibration", "codebook")  # options that name a file
_COMMAND = re.compile(r"^## Reproduce\n\n`{3,}bash\n(kbitq quantize .*)$", re.MULTILINE)
UNKNOWN_SOURCE = "SRC"


def is_repository(source: str) -> bool:
    """Whether a source's label is ``org/name@commit`` of the Hub; a file's or folder's is a name without a ``/``."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", source) is not None


def command_of(ledger: Mapping[str, Any], source: str | None = None, out: str | None = None) -> str:
    """The command that makes the files again, for a POSIX shell.

    Args:
        ledger: ``quantization_report.json``.
        source: what to quantize, where that is known.
        out: the output, where the default would not be it. It is not for a folder made of a file.
    """
    if out is None and source is not None and source.endswith(".safetensors"):
        out = "out"
    words = ["kbitq", "quantize", source or UNKNOWN_SOURCE]
    options = ledger.get("options")
    given = dict(options) if isinstance(options, Mapping) else {}
    recipe = ledger.get("recipe")
    given.update(_named_files(ledger))
    if isinstance(recipe, str) and recipe:
        given = {name: value for name, value in given.items() if name not in _IN_A_RECIPE}
        words += ["--recipe", recipe]
    for name, value in given.items():
        words += _words(name, value)
    return shlex.join([*words, *(["-o", out] if out else [])])


def source_in(card: str) -> str | None:
    """The source that the command of a card names; None of a text that is no card, or of a card that names none."""
    found = _COMMAND.search(card)
    try:
        words = shlex.split(found[1]) if found else []
    except ValueError:
        return None
    return words[2] if len(words) > 2 and words[2] != UNKNOWN_SOURCE else None


def _named_files(ledger: Mapping[str, Any]) -> dict[str, str]:
    """Options that are files, by their names."""
    files = ledger.get("files")
    found = {}
    for entry in files if isinstance(files, list) else []:
        if isinstance(entry, Mapping) and entry.get("option") in _FILES and isinstance(entry.get("name"), str):
            found[entry["option"]] = entry["name"]
    return found


def _words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is None or (name, value) in _DEFAULTS:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, list):
        return [word for item in value if isinstance(item, str) for word in (flag, item)]
    return [flag, str(value)]
