"""How a repository of the Hub is written on the command line: ``org/name`` or ``org/name@revision``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

# As the Hub has it: letters, digits, '.', '_', '-'; neither part begins or ends with '.' or '-'.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPO = re.compile(rf"(?P<id>{_PART}/{_PART})(?:@(?P<revision>[^\s@]+))?")


@dataclass(frozen=True)
class Repo:
    """A model repository. ``revision`` is a branch, a tag or a commit; None is the default branch."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


def parse_repo(source: str) -> Repo | None:
    """The repository that ``source`` names, or None: a path that exists is a path, and so is any other spelling."""
    match = _REPO.fullmatch(source)
    if match is None or os.path.lexists(source) or source.endswith((".safetensors", ".gguf")):
        return None
    return Repo(match["id"], match["revision"])
