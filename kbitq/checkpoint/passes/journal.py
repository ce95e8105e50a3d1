"""The journal of a run: the file in which a run's state is kept, so that an interrupted run goes on where it was.

The journal is only ever appended to, a line for each event. Data first: a line is written only after the data it speaks
of is synced, and it counts only once the journal is synced too. A line that was cut short ends the journal.

Syncing waits for the disk, so it has a thread of its own, and the run goes on meanwhile:

    run      write tiles 0..7 | begin_commit | write tiles 8..15      | begin_commit waits for the one before
    thread                    | sync data, write lines 0..7, sync them |
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from kbitq.checkpoint.output.file_writer import writing
from kbitq.checkpoint.passes.journal_lines import JournalLines, replay_line
from kbitq.checkpoint.passes.run_state import RunState

SYNC_BYTES = 64 << 20  # at most this much, or
SYNC_SECONDS = 1.0  # what this long made, is lost when the power goes
MAX_JOURNAL_BYTES = 1 << 28


class Journal:
    """An open journal. It tells ``state`` what it holds, and records what happens to ``state`` from then on.

    ``holds_work``: something on the disk is worth going on from.
    """

    def __init__(self, path: Path, state: RunState) -> None:
        self.path, self._state, self._lines = path, state, JournalLines()
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(self._fd, self._replay())
                os.lseek(self._fd, 0, os.SEEK_END)
            except BaseException:
                os.close(self._fd)
                raise
        self.holds_work = state.holds_work
        state.recorder = self._lines
        self._unsynced, self._last_sync = 0, time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kbitq-journal")
        self._under_way: Future[None] | None = None

    def due(self, nbytes: int) -> bool:
        """Count ``nbytes`` of data written; whether it is time to commit."""
        self._unsynced += nbytes
        return self._unsynced >= SYNC_BYTES or time.monotonic() - self._last_sync >= SYNC_SECONDS

    def commit(self, sync_data: Callable[[], None] | None = None) -> None:
        """Make the data durable with ``sync_data``, and then the lines about it."""
        self.begin_commit(sync_data)
        self.settle()

    def begin_commit(self, sync_data: Callable[[], None] | None = None) -> None:
        """The same while the caller goes on. What ``sync_data`` needs must stay until ``settle``.

        Waits for the commit before it, so that a power cut costs two stretches of work at most. Raises what that
        commit raised.
        """
        self.settle()
        if lines := self._lines.take():
            self._under_way = self._pool.submit(self._make_durable, lines, sync_data, self._state.holds_work)
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

    def _make_durable(self, lines: bytes, sync_data: Callable[[], None] | None, holds_work: bool) -> None:
        if sync_data is not None:
            sync_data()
        view = memoryview(lines)
        with writing(self.path):
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        self.holds_work = self.holds_work or holds_work

    def _replay(self) -> int:
        """Replay the lines up to the first that is damaged or makes no sense; returns their length in bytes."""
        if os.fstat(self._fd).st_size > MAX_JOURNAL_BYTES:
            return 0
        valid = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            for line in file:
                if not replay_line(line, self._state):
                    break
                valid += len(line)
        return valid
