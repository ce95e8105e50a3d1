"""How the Hub is written on the command line: ``org/name`` or ``org/name@revision``, or a GGUF file of a repository."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

# As the Hub has it: letters, digits, '.', '_', '-'; neither part begins or ends with '.' or '-'.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_FILE = rf"(?:{_PART}/)*{_PART}\.gguf"
_REPO = re.compile(rf"(?P<id>{_PART}/{_PART})(?:/(?P<file>{_FILE}))?(?:@(?P<revision>[^\s@]+))?")


@dataclass(frozen=True)
class Repo:
    """A model repository.

    Attributes:
        id: ``org/name``.
        revision: a branch, a tag or a commit; None is the default branch.
        file: one of its GGUF files, where it has several (quantizations of a model); None for the whole repository.
    """

    id: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        named = f"{self.id}/{self.file}" if self.file else self.id
        return f"{named}@{self.revision}" if self.revision else named


def parse_repo(source: str) -> Repo | None:
    """The repository that ``source`` names, or None: a path that exists is a path, and so is any other spelling."""
    match = _REPO.fullmatch(source)
    if match is None or os.path.lexists(source):
        return None
    if match["file"] is None and match["id"].endswith((".safetensors", ".gguf")):
        return None
    if match["file"] is not None and os.path.lexists(match["id"]):  # a file that a folder here lacks
        return None
    return Repo(match["id"], match["revision"], match["file"])
