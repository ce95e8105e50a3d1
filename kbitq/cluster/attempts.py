"""The journals of a plan that several machines carry out: one for each attempt, read together.

Nobody writes to another's journal, since appends of two machines to one file over NFS are not atomic. A line is written
after its data is on the disk. What several attempts say of one chunk is the same, so any of them will do; what is
damaged, or cut, or about another plan, is passed over.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from kbitq.checkpoint.output.file_writer import sync_folder, writing
from kbitq.checkpoint.passes.journal_lines import format_line, parsed_line
from kbitq.cluster.chunks import ChunkKey

SUFFIX = ".jsonl"
_BEAT_SECONDS = 2.0
_MOST_LINE_BYTES = 1 << 28


class Attempt:
    """The journal of this process: ``note_result`` collects lines, ``commit`` makes them durable; ``beat``: at work."""

    def __init__(self, folder: Path, plan: str, part: str, node: str = "") -> None:
        """``node``: what the launcher calls the machine, where it has a name for it."""
        self.name = secrets.token_hex(8)
        self.path = folder / (self.name + SUFFIX)
        self._lines: list[bytes] = []
        self._lock = Lock()
        self._read, self._last_beat = 0, 0.0
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self.path, flags, 0o666)
        where = {"host": socket.gethostname(), "node": node, "pid": os.getpid()}
        self._note({"is": "attempt", "plan": plan, "part": part, **where})
        self.commit()
        sync_folder(folder)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def note_result(self, key: ChunkKey, layout: str, result: Any) -> None:
        """Keep the line of a chunk that is done for the next ``commit``; ``layout`` is that of its plan."""
        where = {"is": key.phase, "of": key.name, "from": key.start, "to": key.stop}
        self._note({**where, "layout": layout, "result": result})

    def commit(self) -> None:
        """Return when the lines are on the disk. What they speak of must be there already."""
        self.make_durable(self.take())

    def take(self) -> bytes:
        """The lines since the last call, for ``make_durable``."""
        lines = b"".join(self._lines)
        self._lines.clear()
        return lines

    def make_durable(self, lines: bytes) -> None:
        """Append lines, and return when they are on the disk; from any thread."""
        if lines:
            self._append(lines)
            with writing(self.path):
                os.fdatasync(self._fd)

    def beat(self, nbytes: int) -> None:
        """``nbytes`` more were read; says so every two seconds. From any thread."""
        with self._lock:
            self._read += nbytes
            now = time.monotonic()
            if now - self._last_beat < _BEAT_SECONDS:
                return
            self._last_beat = now
            line = format_line({"is": "at", "read": self._read})
        self._append(line)

    def _note(self, record: Mapping[str, Any]) -> None:
        self._lines.append(format_line(record))

    def _append(self, data: bytes) -> None:
        with self._lock, writing(self.path):
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]


@dataclass(frozen=True)
class Place:
    """Where a line lies."""

    path: Path
    offset: int
    count: int


@dataclass
class Follower:
    """What is known of one attempt: its part, where it runs, how far its journal was read, when its first line was read
    and when it last grew (monotonic)."""

    path: Path
    part: str = ""
    host: str = ""
    node: str = ""
    pid: int = 0
    offset: int = 0
    began: float = 0.0
    grew: float = 0.0
    foreign: bool = False
    read: int = 0


class Journals:
    """All journals of a plan, read as far as they are whole; ``update`` reads on.

    ``results`` are the small results by chunk and layout, ``places`` where the lines of the large ones lie.
    """

    def __init__(self, folder: Path, plan: str) -> None:
        self.folder, self._plan = folder, plan
        self.attempts: dict[str, Follower] = {}
        self.results: dict[tuple[ChunkKey, str], Any] = {}
        self.places: dict[tuple[ChunkKey, str], Place] = {}

    def update(self) -> bool:
        """Read what was added since. Whether anything was, a sign of life included."""
        try:
            names = sorted(entry.name for entry in os.scandir(self.folder) if entry.name.endswith(SUFFIX))
        except OSError:
            return False
        grew = [self._read_on(name) for name in names]
        return any(grew)

    def result(self, key: ChunkKey, layout: str) -> Any:
        """The result of a chunk that is done. Raises KeyError where its line is gone."""
        if (key, layout) in self.results:
            return self.results[key, layout]
        place = self.places[key, layout]
        with place.path.open("rb") as file:
            file.seek(place.offset)
            record = parsed_line(file.read(place.count))
        if record is None:
            raise KeyError(key)
        return record["result"]

    def _read_on(self, name: str) -> bool:
        attempt = self.attempts.setdefault(name, Follower(self.folder / name))
        if attempt.foreign:
            return False
        before = attempt.offset
        try:
            # Opened anew each time: that is when NFS asks the server whether its copy is still good.
            with attempt.path.open("rb", buffering=1 << 20) as file:
                file.seek(attempt.offset)
                while line := file.readline(_MOST_LINE_BYTES):
                    record = parsed_line(line)
                    if record is None or not self._take(attempt, record, len(line)):
                        break
                    attempt.offset += len(line)
        except OSError:
            return False
        if attempt.offset > before:
            attempt.grew = time.monotonic()
            attempt.began = attempt.began or attempt.grew
        return attempt.offset > before

    def _take(self, attempt: Follower, record: Mapping[str, Any], count: int) -> bool:
        """Take in one line. False for one that makes no sense: nothing after it is believed."""
        try:
            if attempt.offset == 0:
                attempt.foreign = record["is"] != "attempt" or record["plan"] != self._plan
                attempt.part, attempt.host = str(record["part"]), str(record["host"])
                attempt.node, attempt.pid = str(record["node"]), int(record["pid"])
                return not attempt.foreign
            if record["is"] == "at":
                attempt.read = int(record["read"])
                return True
            key = ChunkKey(str(record["is"]), str(record["of"]), int(record["from"]), int(record["to"]))
            where = key, str(record["layout"])
            if key.phase == "write":
                self.places[where] = Place(attempt.path, attempt.offset, count)
            else:
                self.results[where] = record["result"]
        except (KeyError, TypeError, ValueError):
            return False
        return True
