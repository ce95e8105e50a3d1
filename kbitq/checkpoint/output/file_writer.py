"""Files of known size filled in place, at any offsets in any order; the system's errors as sentences."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kbitq.errors import CheckpointError, NoSpaceError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the system's errors about ``path`` into sentences: NoSpaceError for a full disk, else CheckpointError."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise NoSpaceError(
                f"no space left to write {path}", hint="free some space and run the same command again"
            ) from None
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from None


def write_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data`` at byte ``offset`` of an open file: the system may take less at a time."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


class FileWriter:
    """A file of a size known beforehand, its room reserved at once, filled at any offsets in any order."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                self._reserve(nbytes)
            except BaseException:
                os.close(self._fd)
                raise

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: torch.Tensor | bytes) -> None:
        """Write all of ``data`` (contiguous, on the CPU) at byte ``offset``."""
        flat = data.reshape(-1).view(torch.uint8).numpy() if isinstance(data, torch.Tensor) else data
        with writing(self.path):
            write_all(self._fd, memoryview(flat), offset)  # type: ignore[arg-type]

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        with writing(self.path):
            os.fsync(self._fd)

    def _reserve(self, nbytes: int) -> None:
        try:
            if nbytes:
                os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
        os.ftruncate(self._fd, nbytes)


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    with writing(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
