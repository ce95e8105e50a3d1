"""Whether two paths are the same place on a disk, however they are spelled."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path


def is_or_lies_in(path: str | os.PathLike[str], place: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is ``place`` or lies in it: through links, mounts and other spellings; neither has to exist.

    What exists is told by its inode. What does not is told by its name, and names that some file system takes for the
    same (upper case, Unicode forms, dots and blanks at the end) count as the same.
    """
    path, place = _real(path), _real(place)
    known = identity(place)
    for ancestor in (path, *path.parents):
        found = identity(ancestor)
        if found is not None and found == known:
            return True
        if len(ancestor.parts) == len(place.parts) and (found is None or known is None):
            return _spelling(ancestor) == _spelling(place)
    return False


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what a path leads to; None where there is nothing."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _real(path: str | os.PathLike[str]) -> Path:
    """The path without links, as far as there is one; unlike ``Path.resolve`` it takes a circle of links."""
    return Path(os.path.realpath(path))


def _spelling(path: Path) -> list[str]:
    return [unicodedata.normalize("NFC", part).casefold().rstrip(" .") or part for part in path.parts]
