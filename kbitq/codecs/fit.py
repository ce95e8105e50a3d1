"""Codebooks fitted to the weights themselves: ``fit`` to one tensor, ``fit-shared`` to all tensors of one role.

Lloyd's iteration under the ``mse`` rule (docs/format.md section 3): quantize a sample of blocks with the levels so far,
then move each level to where the weighted squared error of its elements is least, ``sum(w s v) / sum(w s s)``, s being
the scale of the element's block. The search runs on the device of the blocks and gives the same bytes on each; the sums
are float64, one addition after the other in the order of the blocks, always on the CPU. So the levels depend neither on
the device nor on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kbitq import ops
from kbitq.codecs import codebooks
from kbitq.codecs.scales import decode_absmax_e4m4
from kbitq.format import BLOCK, block_count

ITERATIONS = 20
SAMPLE_BLOCKS = 1 << 16


@dataclass(frozen=True)
class Part:
    """Sampled blocks of one tensor that have the same length.

    Attributes:
        w: float32, bfloat16 or float16 ``[n, length]``, length 32 but for the short blocks at the ends of rows.
        amax: float32 ``[1]``, the largest magnitude of the whole tensor.
        place: int64 ``[n]``, where each block stands among all those sampled.
        importance: float32 ``[n, length]``, from rows of ``ops.prepare_importance``, or None.
    """

    w: Tensor
    amax: Tensor
    place: npt.NDArray[np.int64]
    importance: Tensor | None = None


@dataclass(frozen=True)
class Fitted:
    """Levels, float32 ``[2^K]``, and how much lower than with ``optimal`` the noise of the sample became, in dB."""

    levels: codebooks.Levels
    gain_db: float


def sample_positions(blocks: int) -> npt.NDArray[np.int64]:
    """Which of ``blocks`` blocks a codebook is fitted to: ``floor(i * n / S)`` for i < S = min(n, 2^16)."""
    size = min(blocks, SAMPLE_BLOCKS)
    return np.arange(size, dtype=np.int64) * blocks // max(size, 1)


def matrix_parts(
    w: Tensor, amax: Tensor, positions: npt.NDArray[np.int64], place: int = 0, importance: Tensor | None = None
) -> list[Part]:
    """The blocks ``positions`` of a matrix in memory, standing at ``place`` and after it among those sampled.

    Args:
        w: ``[rows, cols]``.
        amax: float32 ``[1]``, of the whole tensor.
        positions: int64, ascending; block b of row r has the position ``r * nblk + b``.
        place: where the first one stands.
        importance: float32 ``[G, cols]`` as in ``ops.quantize``.
    """
    rows, cols = w.shape
    row, block = np.divmod(positions, block_count(cols))
    length = np.minimum(cols - block * BLOCK, BLOCK)
    places, parts = place + np.arange(len(positions)), []
    for size in np.unique(length)[::-1]:
        these = length == size
        at = torch.from_numpy(row[these]).to(w.device)[:, None]
        columns = (torch.from_numpy(block[these] * BLOCK)[:, None] + torch.arange(int(size))).to(w.device)
        weights = None
        if importance is not None:
            weights = importance[torch.div(at, rows // importance.shape[0], rounding_mode="floor"), columns]
        parts.append(Part(w[at, columns], amax, places[these], weights))
    return parts


def fit_tensor(w: Tensor, k: int, amax: Tensor, importance: Tensor | None = None) -> Fitted:
    """The ``fit`` codebook of a matrix ``[rows, cols]``; ``amax`` and ``importance`` as in ``ops.quantize``."""
    positions = sample_positions(w.shape[0] * block_count(w.shape[1]))
    return fit(matrix_parts(w, amax, positions, importance=importance), k)


def fit(parts: Sequence[Part], k: int) -> Fitted:
    """Fit 2^k levels to sampled blocks.

    Args:
        parts: the blocks; their places together are 0 .. S - 1, each once.
        k: bits of an index.
    """
    samples = [_Sample(part) for part in parts]
    size = sum(len(part.place) for part in parts)
    start = levels = codebooks.optimal(k)
    for _ in range(ITERATIONS):
        moved = _moved(samples, size, levels)
        if np.array_equal(moved, levels):
            break  # the fixed point: what is left of the iterations would find it again
        levels = moved
    before, after = (sum(s.noise(c) for s in samples) for c in (start, levels))
    gain = 10 * math.log10(before / after) if before > 0 and after > 0 else 0.0
    return Fitted(levels, gain)


def _moved(samples: Sequence[_Sample], size: int, levels: codebooks.Levels) -> codebooks.Levels:
    """One iteration: sums by level over all blocks in order, an empty level stays, sorted, normalised, float32."""
    index = np.zeros((size, BLOCK), np.intp)
    top, bottom = np.zeros((2, size, BLOCK))  # what lies past the end of a short block adds zero to level 0
    for sample in samples:
        sample.add_terms(levels, index, top, bottom)
    # bincount adds in the order of the elements, which is what makes the sums the same everywhere.
    above, below = (np.bincount(index.ravel(), terms.ravel(), levels.size) for terms in (top, bottom))
    exact = np.divide(above, below, out=levels.astype(np.float64), where=below > 0)
    return codebooks.normalise(np.sort(exact)) if exact.any() else levels


class _Sample:
    """A part, and what of it stays the same from iteration to iteration."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.length = part.w.shape[1]
        dense = len(part.place) and np.array_equal(part.place, np.arange(part.place[0], part.place[-1] + 1))
        self.at = slice(int(part.place[0]), int(part.place[-1]) + 1) if dense else part.place
        self.counting = torch.arange(1 << 8, dtype=torch.float32)
        self.ones = torch.ones((len(part.place), 1))
        self.scales = decode_absmax_e4m4(torch.arange(1 << 8).byte()).double().numpy()
        self.weights = _error_weights(part.importance)
        self.values: npt.NDArray[np.float64] | None = None

    def add_terms(
        self,
        levels: codebooks.Levels,
        index: npt.NDArray[np.intp],
        top: npt.NDArray[np.float64],
        bottom: npt.NDArray[np.float64],
    ) -> None:
        """Write the level that each element takes, ``w s v`` and ``w s s``, to the rows that the part stands at."""
        packed, absmax, codebook = self._quantize(levels)
        if self.values is None:
            # The tensor's power of two is what the level of magnitude 1 became.
            to_blocks = 1 / float(codebook.abs().max())
            self.values = (self.part.w.float().cpu() * to_blocks).double().numpy()
        counting = self.counting[: levels.size]
        chosen = ops.dequantize(packed.cpu(), self.ones, counting, self.length).numpy()
        s = self.scales[absmax.cpu().numpy()]
        terms = s * self.values, np.broadcast_to(s * s, self.values.shape)
        if self.weights is not None:
            terms = self.weights * terms[0], self.weights * terms[1]
        index[self.at, : self.length] = chosen
        top[self.at, : self.length], bottom[self.at, : self.length] = terms

    def noise(self, levels: codebooks.Levels) -> float:
        """The squared error of the part, not weighted, in units of its own tensor."""
        quantized = self._quantize(levels)
        return float(ops.stats(self.part.w, *quantized).sum(0)[1])

    def _quantize(self, levels: codebooks.Levels) -> tuple[Tensor, Tensor, Tensor]:
        part = self.part
        device_levels = torch.from_numpy(levels).to(part.w.device)
        return ops.quantize(part.w, device_levels, amax=part.amax, importance=part.importance)


def _error_weights(importance: Tensor | None) -> npt.NDArray[np.float64] | None:
    """Importance as the core sees it: a block of zeros counts as ones."""
    if importance is None:
        return None
    weights = importance.double().cpu().numpy()
    weights[~weights.any(axis=1)] = 1.0
    return weights
