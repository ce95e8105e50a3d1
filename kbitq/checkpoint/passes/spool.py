"""Reads a distant source once: what the first pass over some tensors has fetched waits on the disk for the second.

Only where reading twice is dear (``Plan.spool_bytes``). The tensors are then scanned and quantized some gigabytes at a
time; what was fetched of them is kept in a nameless file beside the output and thrown away after.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from types import TracebackType

from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source import memory
from kbitq.checkpoint.source.storage import ByteFile, Fingerprint, Storage


def groups(tensors: Iterable[TensorPlan]) -> Iterator[list[TensorPlan]]:
    """Tensors in order, as many at a time as a spool should hold, but never less than one."""
    group: list[TensorPlan] = []
    size = 0
    for tensor in tensors:
        group.append(tensor)
        size += tensor.bytes_in if tensor.quantized else 0
        if size >= memory.SPOOL_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


@dataclass(frozen=True)
class _Place:
    """Where some bytes of a file lie in the spool."""

    offset: int
    count: int


class Spool:
    """The nameless file. While ``keeping``, it keeps what is read through :meth:`over`, and serves that again."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by this context manager's exit
        self._lock = Lock()
        self._kept: dict[tuple[str, int], _Place] = {}
        self._end = 0
        self.keeping = False

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def over(self, plan: Plan) -> Plan:
        """The plan, with a source that is read through this spool."""
        return replace(
            plan, checkpoint=replace(plan.checkpoint, storage=_SpooledStorage(plan.checkpoint.storage, self))
        )

    def clear(self) -> None:
        """Let go of all that was kept."""
        with self._lock:
            self._kept.clear()
            self._end = 0
            self._file.truncate(0)

    def read(self, name: str, file: ByteFile, buffer: memoryview, offset: int) -> None:
        """``file.read_into``, from the spool if exactly this was kept."""
        place = self._kept.get((name, offset))
        if place is not None and place.count == len(buffer) and _read(self._file.fileno(), buffer, place.offset):
            return
        file.read_into(buffer, offset)
        if self.keeping:
            self._keep(name, buffer, offset)

    def _keep(self, name: str, data: memoryview, offset: int) -> None:
        with self._lock:
            start, self._end = self._end, self._end + len(data)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], start + done)
        except OSError:
            return  # no room: it will be fetched again
        self._kept[name, offset] = _Place(start, len(data))


def _read(fd: int, buffer: memoryview, offset: int) -> bool:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


class _SpooledFile:
    def __init__(self, name: str, file: ByteFile, spool: Spool) -> None:
        self.where, self.size = file.where, file.size
        self._name, self._file, self._spool = name, file, spool

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self._spool.read(self._name, self._file, buffer, offset)

    def fingerprint(self) -> Fingerprint:
        return self._file.fingerprint()

    def close(self) -> None:
        self._file.close()


class _SpooledStorage:
    distant = True

    def __init__(self, storage: Storage, spool: Spool) -> None:
        self.where, self.name, self.label = storage.where, storage.name, storage.label
        self._storage, self._spool = storage, spool

    @property
    def single(self) -> str | None:
        return self._storage.single

    def names(self) -> list[str]:
        return self._storage.names()

    def skipped(self) -> list[str]:
        return self._storage.skipped()

    def open(self, name: str) -> ByteFile:
        return _SpooledFile(name, self._storage.open(name), self._spool)
