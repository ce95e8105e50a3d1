"""The files of a checkpoint that are open: a few at a time, shared by threads, each held to what its header said."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from kbitq.checkpoint.source.open import Checkpoint
from kbitq.checkpoint.source.storage import ByteFile
from kbitq.errors import SourceChangedError

MAX_OPEN_FILES = 16


class OpenFiles:
    """Opens a checkpoint's files as they are asked for; the one not used for longest is closed for the next."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: OrderedDict[str, ByteFile] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._lock = Lock()  # threads that read ahead open and close files too

    def close(self) -> None:
        """Close all of them."""
        while self._files:
            self._files.popitem()[1].close()

    def check_unchanged(self) -> None:
        """Raise SourceChangedError if an open file is no longer the one whose header was planned with."""
        with self._lock:
            for name in list(self._files):
                self._check(name, self._files[name])

    @contextmanager
    def in_use(self, name: str) -> Iterator[ByteFile]:
        """An open file, which is not closed before the end of the block; several threads may read it at once."""
        with self._lock:
            file = self._file(name)
            self._users[name] += 1
        try:
            yield file
        finally:
            with self._lock:
                self._users[name] -= 1

    def _file(self, name: str) -> ByteFile:
        file = self._files.get(name)
        if file is None:
            idle = (other for other in self._files if not self._users[other])
            if len(self._files) >= MAX_OPEN_FILES and (old := next(idle, None)) is not None:
                closing = self._files.pop(old)
                self._check(old, closing)
                closing.close()
            file = self._files[name] = self._checkpoint.storage.open(name)
            self._check(name, file)
        self._files.move_to_end(name)
        return file

    def _check(self, name: str, file: ByteFile) -> None:
        if file.fingerprint() != self._checkpoint.fingerprints[name]:
            raise SourceChangedError(
                f"{file.where} changed while it was used", hint="run the command again when nothing writes to it"
            )
