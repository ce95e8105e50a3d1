"""What a run knows: what the first pass found, how far each tensor is written, its errors, digests of whole files.

The passes tell the state what happens; a recorder (the journal) hears of it, in the same order. When a run is taken up
again, the journal tells a new state the same story.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from kbitq.checkpoint.source.spans import Span
from kbitq.quantized import sqnr_db


@dataclass
class Scan:
    """What a first pass finds. ``amax`` is over the finite values; ``first`` a flat index, -1 for none."""

    amax: float = 0.0
    nonfinite: int = 0
    first: int = -1

    def add(self, later: Scan) -> None:
        """Take in what was found in a later part of the same tensor."""
        self.amax = max(self.amax, later.amax)
        if later.nonfinite and not self.nonfinite:
            self.first = later.first
        self.nonfinite += later.nonfinite


@dataclass
class ErrorSums:
    """Sums of docs/format.md section 3, carried from tile to tile: the result does not depend on how a tensor is cut.

    Rows are added in row order; the blocks of a row that is cut are added left to right before it counts as a row.
    """

    signal: float = 0.0
    noise: float = 0.0
    max_abs_err: float = 0.0
    _row: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, span: Span, table: torch.Tensor) -> None:
        """Add the result of ``ops.stats`` on a span: float64 ``[rows, 3]``."""
        columns = table.cpu().numpy()
        self.max_abs_err = max(self.max_abs_err, float(columns[:, 2].max()))
        if span.whole_rows:
            self.signal = _added(self.signal, columns[:, 0])
            self.noise = _added(self.noise, columns[:, 1])
            return
        self._row = [_added(self._row[i], columns[:, i]) for i in (0, 1)]
        if span.ends_row:
            self.signal += self._row[0]
            self.noise += self._row[1]
            self._row = [0.0, 0.0]

    def copy(self) -> ErrorSums:
        return ErrorSums.from_values(self.values())

    def values(self) -> list[float]:
        """All sums, for ``from_values``."""
        return [self.signal, self.noise, self.max_abs_err, *self._row]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> ErrorSums:
        """The sums again. Raises ValueError for another number of values."""
        signal, noise, max_abs_err, *row = values
        if len(row) != 2:
            raise ValueError(f"{len(values)} error sums")
        return cls(signal, noise, max_abs_err, row)

    @property
    def sqnr_db(self) -> float | None:
        """In dB; None where it is not finite."""
        return sqnr_db(self.signal, self.noise)


def _added(start: float, terms: np.ndarray) -> float:
    """``start`` plus the terms, one after the other: a plain sum would add them in pairs and round differently."""
    return float(np.add.accumulate(np.concatenate(([start], terms)))[-1])


class RunEvents(Protocol):
    """What happens in a run. Positions are elements of a tensor's matrix, or bytes of a tensor that is copied."""

    def started(self, key: Mapping[str, Any]) -> None:
        """The run began; ``key`` says what its output depends on."""

    def scan_reached(self, tensor: str, element: int, found: Scan) -> None:
        """A tensor is scanned up to ``element``, and this was found so far."""

    def scan_finished(self, tensor: str, found: Scan) -> None:
        """A tensor is scanned."""

    def tensor_reached(self, tensor: str, position: int, error_sums: ErrorSums | None) -> None:
        """A tensor is written up to ``position``. ``error_sums`` so far; None for one that is copied."""

    def tensor_finished(self, tensor: str, error_sums: ErrorSums | None) -> None:
        """A tensor is written."""

    def file_finished(self, file: str, sha256: str) -> None:
        """A file is complete and on the disk. ``sha256`` in hexadecimal; empty where no checksum is wanted."""


@dataclass(frozen=True)
class BegunScan:
    """A tensor that is scanned up to ``element``."""

    tensor: str
    element: int
    found: Scan


@dataclass(frozen=True)
class BegunTensor:
    """A tensor that is written up to ``position`` (see ``RunEvents``)."""

    tensor: str
    position: int
    error_sums: ErrorSums | None


@dataclass
class RunState:
    """How far a run is. ``tensors`` are the finished ones with their error sums, None for a copied one; ``digests`` are
    those of the finished files. ``recorder`` hears of every event after the state took it in.
    """

    key: dict[str, Any] | None = None
    scans: dict[str, Scan] = field(default_factory=dict)
    begun_scan: BegunScan | None = None
    tensors: dict[str, ErrorSums | None] = field(default_factory=dict)
    begun_tensor: BegunTensor | None = None
    digests: dict[str, str] = field(default_factory=dict)
    recorder: RunEvents | None = None

    @property
    def holds_work(self) -> bool:
        """Whether there is anything to go on from."""
        return bool(self.scans or self.begun_scan or self.wrote)

    @property
    def wrote(self) -> bool:
        """Whether anything of the output is written."""
        return bool(self.tensors or self.begun_tensor)

    def scan_so_far(self, tensor: str) -> tuple[int, Scan]:
        """The element to go on scanning from, and what was found before it."""
        begun = self.begun_scan
        return (begun.element, replace(begun.found)) if begun is not None and begun.tensor == tensor else (0, Scan())

    def written_so_far(self, tensor: str) -> tuple[int, ErrorSums]:
        """The position to go on writing from, and the error sums of what is before it."""
        begun = self.begun_tensor
        if begun is None or begun.tensor != tensor:
            return 0, ErrorSums()
        return begun.position, begun.error_sums.copy() if begun.error_sums is not None else ErrorSums()

    def started(self, key: Mapping[str, Any]) -> None:
        self.key = dict(key)
        if self.recorder is not None:
            self.recorder.started(key)

    def scan_reached(self, tensor: str, element: int, found: Scan) -> None:
        self.begun_scan = BegunScan(tensor, element, found)
        if self.recorder is not None:
            self.recorder.scan_reached(tensor, element, found)

    def scan_finished(self, tensor: str, found: Scan) -> None:
        self.scans[tensor], self.begun_scan = found, None
        if self.recorder is not None:
            self.recorder.scan_finished(tensor, found)

    def tensor_reached(self, tensor: str, position: int, error_sums: ErrorSums | None) -> None:
        self.begun_tensor = BegunTensor(tensor, position, error_sums)
        if self.recorder is not None:
            self.recorder.tensor_reached(tensor, position, error_sums)

    def tensor_finished(self, tensor: str, error_sums: ErrorSums | None) -> None:
        self.tensors[tensor], self.begun_tensor = error_sums, None
        if self.recorder is not None:
            self.recorder.tensor_finished(tensor, error_sums)

    def file_finished(self, file: str, sha256: str) -> None:
        self.digests[file] = sha256
        if self.recorder is not None:
            self.recorder.file_finished(file, sha256)
