"""How far a pass over a source is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        bytes_done: of the source, read so far (both passes counted).
        bytes_total: to be read in all.
        tensor: the one at hand.
    """

    bytes_done: int
    bytes_total: int
    tensor: str


class ProgressMeter:
    """Counts bytes for a callback."""

    def __init__(self, callback: Callable[[Progress], None] | None, total: int) -> None:
        self._callback, self._total, self._done = callback, total, 0

    def add(self, nbytes: int, tensor: str) -> None:
        self._done += nbytes
        if self._callback is not None:
            self._callback(Progress(self._done, self._total, tensor))
