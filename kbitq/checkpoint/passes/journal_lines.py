"""The lines of a journal: a record of what happened in a run is JSON with a checksum before it, one record a line."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from kbitq.checkpoint.passes.run_state import ErrorSums, RunEvents, Scan


class JournalLines:
    """A recorder of a run's state that makes a line of every event."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def take(self) -> bytes:
        """The lines since the last call."""
        lines = b"".join(self._lines)
        self._lines.clear()
        return lines

    def started(self, key: Mapping[str, Any]) -> None:
        self._note("run", key=dict(key))

    def scan_reached(self, tensor: str, element: int, found: Scan) -> None:
        self._note("scanning", tensor=tensor, next=element, found=scan_record(found))

    def scan_finished(self, tensor: str, found: Scan) -> None:
        self._note("scan", tensor=tensor, found=scan_record(found))

    def tensor_reached(self, tensor: str, position: int, error_sums: ErrorSums | None) -> None:
        self._note("part", tensor=tensor, next=position, sums=_error_sums_record(error_sums))

    def tensor_finished(self, tensor: str, error_sums: ErrorSums | None) -> None:
        self._note("tensor", tensor=tensor, sums=_error_sums_record(error_sums))

    def file_finished(self, file: str, sha256: str) -> None:
        self._note("file", file=file, sha256=sha256)

    def _note(self, kind: str, **values: Any) -> None:
        self._lines.append(format_line({"is": kind, **values}))


def format_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of a journal."""
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def replay_line(line: bytes, events: RunEvents) -> bool:
    """Tell ``events`` what a line records. False, and nothing told, for a line that is damaged or makes no sense."""
    record = parsed_line(line)
    if record is None:
        return False
    try:
        _tell(record, events)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
    return True


def parsed_line(line: bytes) -> dict[str, Any] | None:
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


def _tell(record: Mapping[str, Any], events: RunEvents) -> None:
    """Raises KeyError, TypeError, ValueError or OverflowError for a record that makes no sense."""
    kind = record["is"]
    if kind == "run":
        events.started(dict(record["key"]))
    elif kind == "scan":
        events.scan_finished(str(record["tensor"]), scan_of(record["found"]))
    elif kind == "scanning":
        events.scan_reached(str(record["tensor"]), int(record["next"]), scan_of(record["found"]))
    elif kind == "part":
        events.tensor_reached(str(record["tensor"]), int(record["next"]), _error_sums(record["sums"]))
    elif kind == "tensor":
        events.tensor_finished(str(record["tensor"]), _error_sums(record["sums"]))
    elif kind == "file":
        events.file_finished(str(record["file"]), str(record["sha256"]))
    else:
        raise ValueError(kind)


def scan_record(scan: Scan) -> list[str | int]:
    """A scan as JSON that gives every bit back."""
    return [scan.amax.hex(), scan.nonfinite, scan.first]


def scan_of(found: Any) -> Scan:
    """A scan again. Raises TypeError, ValueError or OverflowError for what is none."""
    amax, nonfinite, first = found
    return Scan(float.fromhex(amax), int(nonfinite), int(first))


def _error_sums_record(error_sums: ErrorSums | None) -> list[str] | None:
    """Error sums as JSON that gives every bit back."""
    return None if error_sums is None else [value.hex() for value in error_sums.values()]


def _error_sums(texts: Any) -> ErrorSums | None:
    return None if texts is None else ErrorSums.from_values([float.fromhex(text) for text in texts])
