"""What a process has written to be made durable, and after it the lines of its journal that speak of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kbitq.cluster.attempts import Attempt
from kbitq.cluster.chunks import ChunkKey
from kbitq.cluster.job import Job
from kbitq.cluster.pages import PageWriter, SharedFile
from kbitq.cluster.results import edges_json

SYNC_BYTES = 256 << 20  # of the source: at most this much, or
SYNC_SECONDS = 5.0  # what was done in this long, is done again after a worker died
_MOST_FILES = 64  # open at a time


class Commits:
    """Makes what was written durable, and then the lines about it, in a thread while the work goes on.

    Args:
        job: whose output is written.
        attempt: whose journal gets the lines.
        check: is called before any lines are taken; what it raises leaves none.
    """

    def __init__(self, job: Job, attempt: Attempt, check: Callable[[], None] = lambda: None) -> None:
        self._job, self._attempt, self._check = job, attempt, check
        self._files: dict[str, SharedFile] = {}
        self._pages: dict[str, PageWriter] = {}
        self._noted: dict[ChunkKey, Any] = {}
        self._settling: dict[ChunkKey, Any] = {}
        self._begun: set[str] | None = None
        self._unsynced, self._last_sync = 0, time.monotonic()
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="kbitq-journal")
        self._under_way: Future[None] | None = None

    def __enter__(self) -> Commits:
        return self

    def __exit__(self, *_: object) -> None:
        self._syncing.shutdown()
        _close(self._files.values())

    def file(self, name: str, nbytes: int) -> SharedFile:
        """A file of the output, open until the next commit."""
        if name not in self._files:
            path = self._job.staging.output / name
            self._files[name] = SharedFile(path, nbytes, begun=name in self._begun_files())
        return self._files[name]

    def pages(self, name: str, nbytes: int) -> PageWriter:
        """What chunks write to a file until the next commit."""
        if name not in self._pages:
            self._pages[name] = PageWriter(self.file(name, nbytes), self._job.file.page)
        return self._pages[name]

    def note(self, key: ChunkKey, result: Any, nbytes: int) -> None:
        """A chunk is done, for which ``nbytes`` were read or written; soon, and after its data, its line is durable."""
        self._noted[key] = result
        self._unsynced += nbytes
        late = time.monotonic() - self._last_sync >= SYNC_SECONDS
        if late or self._unsynced >= SYNC_BYTES or len(self._files) >= _MOST_FILES:
            self.begin()

    def result(self, key: ChunkKey) -> Any | None:
        """The result of a chunk whose line may not be durable yet; None of all others."""
        return self._settling.get(key)

    def begin(self) -> None:
        """Begin with all files and lines since the last call, when what that began is durable. Between two chunks."""
        self._check()
        self.settle()
        for pages in self._pages.values():
            for key, edges in pages.take_edges().items():
                self._noted[key]["edges"] = edges_json(edges)
        for key, result in self._noted.items():
            self._attempt.note_result(key, self._job.layout, result)
        files, self._files, self._pages = list(self._files.values()), {}, {}
        self._settling, self._noted = self._noted, {}
        self._under_way = self._syncing.submit(_make_durable, files, self._attempt, self._attempt.take())
        self._unsynced, self._last_sync = 0, time.monotonic()

    def settle(self) -> None:
        """Return when the commit under way is durable; raise what it raised."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def _begun_files(self) -> set[str]:
        """The files of which the journals know a chunk."""
        if self._begun is None:
            written = {key.name for key, layout in self._job.journals.places if layout == self._job.layout}
            metas = {s.name: s.meta for s in self._job.plan.shards if s.meta is not None}
            self._begun = {n for n, m in metas.items() if not written.isdisjoint((*m.tensors, *m.kept))}
        return self._begun


def _make_durable(files: Sequence[SharedFile], attempt: Attempt, lines: bytes) -> None:
    try:
        for file in files:
            file.sync()
    finally:
        _close(files)
    attempt.make_durable(lines)


def _close(files: Iterable[SharedFile]) -> None:
    for file in files:
        file.close()
