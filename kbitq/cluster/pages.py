"""Writing parts of one file from several machines: only whole pages that one chunk fills.

Over NFS a machine may send a whole page although a few bytes of it changed, and so undo what another wrote beside them.
So a chunk writes the pages that it fills by itself; what it has of others goes into its journal, and whoever seals the
file puts those bytes in their places.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from kbitq.checkpoint.output.file_writer import write_all, writing
from kbitq.errors import CheckpointError


class SharedFile:
    """A file of known size that several machines fill. It is made at its size where it is not there yet.

    Args:
        path: of the file.
        nbytes: its size.
        begun: something of it was written: then it must be there, at its size.

    Raises:
        CheckpointError: it is not.
    """

    def __init__(self, path: Path, nbytes: int, *, begun: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if begun else os.O_CREAT)
        with writing(path):
            if not begun:
                path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fd = os.open(path, flags, 0o666)
            except FileNotFoundError:
                raise _gone(path) from None
            try:
                size = os.fstat(self._fd).st_size
                if begun and size != nbytes:
                    raise _gone(path)
                # Never posix_fallocate: where a file system lacks it, the C library writes zeros over others' bytes.
                if size != nbytes:
                    os.ftruncate(self._fd, nbytes)
            except BaseException:
                os.close(self._fd)
                raise

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at byte ``offset``."""
        with writing(self.path):
            write_all(self._fd, data, offset)

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        with writing(self.path):
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _gone(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} was removed or cut short, and the journals beside it say that parts of it are written",
        remedy="plan-again",
    )


class PageWriter:
    """What one chunk writes to a file. ``edges`` are the bytes that it has on pages that it does not fill."""

    def __init__(self, file: SharedFile, page: int) -> None:
        self._file, self._page = file, page
        self._partial: dict[int, dict[int, bytes]] = {}  # page -> offset in the file -> bytes there

    def write(self, offset: int, data: torch.Tensor | bytes) -> None:
        """Write all of ``data`` (contiguous, on the CPU) at byte ``offset``, but what lies on pages not filled yet."""
        flat = data.reshape(-1).view(torch.uint8).numpy() if isinstance(data, torch.Tensor) else data
        view = memoryview(flat)  # type: ignore[arg-type]
        end, page = offset + len(view), self._page
        first, last = -(-offset // page) * page, end // page * page
        if first < last:
            self._file.write_at(first, view[first - offset : last - offset])
        if offset < min(first, end):
            self._keep(offset, bytes(view[: min(first, end) - offset]))
        if max(last, first) < end:
            self._keep(max(last, first), bytes(view[max(last, first) - offset :]))

    def edges(self) -> Iterator[tuple[int, bytes]]:
        """Offsets and bytes, none of them next to each other."""
        for number in sorted(self._partial):
            yield from sorted(self._partial[number].items())

    def _keep(self, offset: int, data: bytes) -> None:
        """Keep bytes of one page, joined to those that they follow or that follow them; write it when it is full."""
        number = offset // self._page
        runs = self._partial.setdefault(number, {})
        for start, before in list(runs.items()):
            if start + len(before) == offset:
                offset, data = start, before + data
                del runs[start]
            elif offset + len(data) == start:
                data += before
                del runs[start]
        runs[offset] = data
        if len(data) == self._page:
            self._file.write_at(offset, data)
            del self._partial[number]
