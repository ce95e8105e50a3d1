"""A part of a tensor that stands for all of it: evenly spaced runs of blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kbitq.checkpoint.source.open import SourceTensor
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.format import BLOCK, matrix_shape  # fmt: skip

SAMPLE_BLOCKS = 1 << 14  # of a tensor: the SQNR of a matrix is then good to about 0.05 dB
SAMPLE_RUN = 8  # pieces that are read together


def sampled(reader: TileReader, tensor: SourceTensor, cut: int = BLOCK) -> Iterator[tuple[Span, torch.Tensor]]:
    """Evenly spaced runs of ``cut`` columns as one matrix ``[n, cut]``; the whole tensor if that is not much more."""
    rows, cols = matrix_shape(tensor.name, tensor.shape)
    whole, pieces = cols // cut, SAMPLE_BLOCKS * BLOCK // cut
    if rows * whole <= 4 * pieces:
        all_of_it = Span(0, 0, rows, cols, True, True, cols)
        yield all_of_it, reader.read(tensor, all_of_it).clone()
        return
    length = min(SAMPLE_RUN, whole)
    runs, per_row = pieces // length, whole // length
    gathered = []
    for run in np.arange(runs, dtype=np.int64) * (rows * per_row) // runs:
        row, within = divmod(int(run), per_row)
        first = row * cols + within * length * cut
        span = Span(first, first // BLOCK, length, cut, False, False, cols)
        gathered.append(reader.read(tensor, span).clone())
    yield Span(0, 0, runs * length, cut, True, True, cut), torch.cat(gathered)
