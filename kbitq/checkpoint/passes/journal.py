"""The journal of a run: what is known to be on the disk, so that an interrupted run goes on where it was.

Append-only, a line a record, each with a checksum. Data first: a record is written only after the data it speaks of has
been synced, and counts only once the journal itself has been. A line that was cut short ends the journal.

Syncing waits for the disk, so it has a thread of its own, and the run goes on meanwhile:

    run      write tiles 0..7 | begin_commit | write tiles 8..15        | begin_commit waits for the one before
    thread                    | sync data, write records 0..7, sync them |
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbitq.checkpoint.output.file_writer import writing
from kbitq.checkpoint.passes.run_state import ErrorSums, Scan

SYNC_BYTES = 64 << 20  # at most this much, or
SYNC_SECONDS = 1.0  # what this long made, is lost when the power goes
MAX_JOURNAL_BYTES = 1 << 28


@dataclass
class Done:
    """What a journal tells: scans, finished tensors with their sums (None for a copied one), digests of files."""

    key: dict[str, Any] | None = None
    scans: dict[str, Scan] = field(default_factory=dict)
    scanning: tuple[str, int, Scan] | None = None  # tensor, element to go on from, what was found so far
    tensors: dict[str, ErrorSums | None] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    partial: tuple[str, int, ErrorSums | None] | None = None  # tensor, position to go on from, sums so far


class Journal:
    """An open journal. ``done`` is what it held when it was opened, kept up with what is added.

    ``holds_work``: something on the disk is worth going on from.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, Done()
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(self._fd, self._replay())
                self.holds_work = bool(self.done.scans or self.done.scanning or self.done.tensors or self.done.partial)
                os.lseek(self._fd, 0, os.SEEK_END)
            except BaseException:
                os.close(self._fd)
                raise
        self._pending: list[bytes] = []
        self._unsynced, self._last_sync = 0, time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kbitq-journal")
        self._under_way: Future[None] | None = None

    def add(self, kind: str, **values: Any) -> None:
        """Note a record; it is written by the next commit."""
        record = {"is": kind, **values}
        self._pending.append(_line(record))
        apply(self.done, record)

    def due(self, nbytes: int) -> bool:
        """Count ``nbytes`` of data written; whether it is time to commit."""
        self._unsynced += nbytes
        return self._unsynced >= SYNC_BYTES or time.monotonic() - self._last_sync >= SYNC_SECONDS

    def commit(self, sync_data: Callable[[], None] | None = None) -> None:
        """Make the data durable with ``sync_data``, and then the records about it."""
        self.begin_commit(sync_data)
        self.settle()

    def begin_commit(self, sync_data: Callable[[], None] | None = None) -> None:
        """The same while the caller goes on. What ``sync_data`` needs must stay until ``settle``.

        Waits for the commit before it, so that two stretches of work at most are at stake. Raises what that raised.
        """
        self.settle()
        if self._pending:
            lines = b"".join(self._pending)
            self._pending.clear()
            worth = bool(self.done.scans or self.done.scanning)
            self._under_way = self._pool.submit(self._make_durable, lines, sync_data, worth)
        self._unsynced, self._last_sync = 0, time.monotonic()

    def settle(self) -> None:
        """Return when the commit under way is durable; raise what it raised."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """No commit is under way any more when the block is left, by an error too."""
        try:
            yield
        except BaseException:
            if self._under_way is not None:
                wait([self._under_way])
            raise
        self.settle()

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    def _make_durable(self, lines: bytes, sync_data: Callable[[], None] | None, worth: bool) -> None:
        if sync_data is not None:
            sync_data()
        view = memoryview(lines)
        with writing(self.path):
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        self.holds_work = self.holds_work or worth

    def _replay(self) -> int:
        """Apply the journal's lines up to the first that is not whole; returns their length in bytes."""
        if os.fstat(self._fd).st_size > MAX_JOURNAL_BYTES:
            return 0
        valid = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            for line in file:
                record = _parsed(line)
                if record is None:
                    break
                try:
                    apply(self.done, record)
                except (KeyError, TypeError, ValueError, OverflowError):
                    break
                valid += len(line)
        return valid


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None if the line is damaged."""
    if len(line) < 10 or not line.endswith(b"\n"):
        return None
    try:
        if int(line[:8], 16) != zlib.crc32(line[9:-1]):
            return None
        record = json.loads(line[9:])
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def sums_record(sums: ErrorSums | None) -> list[str] | None:
    """Sums as text that gives every bit back."""
    return None if sums is None else [value.hex() for value in sums.state()]


def apply(done: Done, record: Mapping[str, Any]) -> None:
    """Add one record to what is known. Raises KeyError, TypeError or ValueError for one that makes no sense."""
    kind = record["is"]
    if kind == "run":
        done.key = dict(record["key"])
    elif kind == "scan":
        done.scans[str(record["tensor"])] = _scan(record["found"])
        done.scanning = None
    elif kind == "scanning":
        done.scanning = (str(record["tensor"]), int(record["next"]), _scan(record["found"]))
    elif kind == "part":
        done.partial = (str(record["tensor"]), int(record["next"]), _sums(record["sums"]))
    elif kind == "tensor":
        done.tensors[str(record["tensor"])] = _sums(record["sums"])
        done.partial = None
    elif kind == "file":
        done.files[str(record["file"])] = str(record["sha256"])
    else:
        raise ValueError(kind)


def scan_record(scan: Scan) -> list[str | int]:
    """A scan as JSON that gives every bit back."""
    return [scan.amax.hex(), scan.nonfinite, scan.first]


def _scan(found: Any) -> Scan:
    amax, nonfinite, first = found
    return Scan(float.fromhex(amax), int(nonfinite), int(first))


def _sums(texts: Any) -> ErrorSums | None:
    return None if texts is None else ErrorSums.from_state([float.fromhex(text) for text in texts])
