"""What a run knows of each tensor: what the first pass found, and the sums of errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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

    def state(self) -> list[float]:
        """All sums, for ``from_state``."""
        return [self.signal, self.noise, self.max_abs_err, *self._row]

    @classmethod
    def from_state(cls, state: Sequence[float]) -> ErrorSums:
        """The sums again. Raises ValueError for a state of another length."""
        signal, noise, max_abs_err, *row = state
        if len(row) != 2:
            raise ValueError(f"{len(state)} sums")
        return cls(signal, noise, max_abs_err, row)

    @property
    def sqnr_db(self) -> float | None:
        """In dB; None where it is not finite."""
        return sqnr_db(self.signal, self.noise)


def _added(start: float, terms: np.ndarray) -> float:
    """``start`` plus the terms, one after the other: a plain sum would add them in pairs and round differently."""
    return float(np.add.accumulate(np.concatenate(([start], terms)))[-1])
