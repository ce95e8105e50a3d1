"""Writing parts of one file from several machines: only whole pages that one process fills.

Over NFS a machine may send a whole page although a few bytes of it changed, and so undo what another wrote beside them.
So a process writes the pages that chunks fill whose lines it is about to commit; what they have of others goes into
those lines, and whoever seals the file puts those bytes in their places.
"""

from __future__ import annotations

import os
from bisect import insort
from pathlib import Path
from typing import NamedTuple

import torch

from kbitq.checkpoint.output.file_writer import write_all, writing
from kbitq.cluster.chunks import ChunkKey
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
                raise removed(path) from None
            try:
                size = os.fstat(self._fd).st_size
                if begun and size != nbytes:
                    raise removed(path)
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


def removed(path: Path) -> CheckpointError:
    """What is to be said of a file that is not there as the journals have it."""
    return CheckpointError(
        f"{path} was removed or cut short, and the journals beside it say that parts of it are written",
        remedy="plan-again",
    )


class PageWriter:
    """What a process writes to one file between two commits: the pages that its chunks fill, alone or together.

    ``take_edges`` gives the bytes that are left on other pages, by the chunk that they are of.
    """

    def __init__(self, file: SharedFile, page: int) -> None:
        self._file, self._page = file, page
        self._partial: dict[int, list[_Run]] = {}

    def write(self, offset: int, data: torch.Tensor | bytes, chunk: ChunkKey) -> None:
        """Write all of ``data`` (contiguous, on the CPU) at byte ``offset``, but what lies on pages not filled yet."""
        flat = data.reshape(-1).view(torch.uint8).numpy() if isinstance(data, torch.Tensor) else data
        view = memoryview(flat)  # type: ignore[arg-type]
        end, page = offset + len(view), self._page
        first, last = -(-offset // page) * page, end // page * page
        if first < last:
            self._file.write_at(first, view[first - offset : last - offset])
        if offset < min(first, end):
            self._keep(_Run(offset, bytes(view[: min(first, end) - offset]), chunk))
        if max(last, first) < end:
            self._keep(_Run(max(last, first), bytes(view[max(last, first) - offset :]), chunk))

    def take_edges(self) -> dict[ChunkKey, list[tuple[int, bytes]]]:
        """Offsets and bytes that were not written, by chunk; none are kept any longer."""
        found: dict[ChunkKey, list[tuple[int, bytes]]] = {}
        for number in sorted(self._partial):
            for run in self._partial[number]:
                edges = found.setdefault(run.chunk, [])
                if edges and edges[-1][0] + len(edges[-1][1]) == run.offset:
                    edges[-1] = edges[-1][0], edges[-1][1] + run.data
                else:
                    edges.append((run.offset, run.data))
        self._partial.clear()
        return found

    def _keep(self, run: _Run) -> None:
        """Keep bytes of one page, and write it when it is full."""
        number = run.offset // self._page
        runs = self._partial.setdefault(number, [])
        insort(runs, run)
        if sum(len(r.data) for r in runs) == self._page:
            self._file.write_at(number * self._page, b"".join(r.data for r in runs))
            del self._partial[number]


class _Run(NamedTuple):
    """Bytes on a page that are not written yet; no byte of the output is of two chunks, so runs do not overlap."""

    offset: int
    data: bytes
    chunk: ChunkKey
