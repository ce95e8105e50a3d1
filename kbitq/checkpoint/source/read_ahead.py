"""Reads a source into the page cache while torch is still being imported. Imports no torch itself."""

from __future__ import annotations

import threading
from types import TracebackType

from kbitq.checkpoint.source.open import Checkpoint
from kbitq.checkpoint.source.storage import LocalFileStorage, LocalFolderStorage
from kbitq.errors import KbitqError

_STEP = 8 << 20
_MOST = 8 << 30  # bytes; what a fast disk gives in the seconds that there are


class ReadAhead:
    """For the length of a ``with`` block, a thread reads what a run will read first. Local sources only."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="kbitq-read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        if isinstance(self._checkpoint.storage, LocalFileStorage | LocalFolderStorage):
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _read(self) -> None:
        buffer, left = memoryview(bytearray(_STEP)), _MOST
        for name in self._checkpoint.fingerprints:
            try:
                file = self._checkpoint.storage.open(name)
            except KbitqError:
                return  # the run itself will find out and say so
            try:
                for start in range(0, file.size, _STEP):
                    if self._stop.is_set() or left <= 0:
                        return
                    count = min(_STEP, file.size - start)
                    file.read_into(buffer[:count], start)
                    left -= count
            except KbitqError:
                return
            finally:
                file.close()
