"""Codebooks fitted to the weights themselves: ``fit`` to one tensor, ``fit-shared`` to all tensors of one role.

Lloyd's iteration under the ``mse`` rule (docs/format.md section 3): quantize a sample of the columns that share a scale
(runs of a codec's ``cut``, called blocks here) with the levels so far, then move each level to where the weighted
squared error of its elements is least, ``sum(w s v) / sum(w s s)``, s being the scale of the element's block. The
search runs on the device of the blocks and gives the same bytes on each; the sums are float64, one addition after the
other in the order of the blocks, always on the CPU. So the levels depend neither on the device nor on the number of
threads.

Most weights are close to normal, and ``optimal`` is made for those. The first step says so: where it would remove less
than ``LEAST_GAIN`` of the squared error, all twenty would gain next to nothing, and ``optimal`` stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kbitq.codecs import codebooks
from kbitq.codecs.base import Request
from kbitq.codecs.planes import ABSMAX, CODEBOOK, PLANES, Planes
from kbitq.codecs.scales import decode_absmax_e4m4
from kbitq.format import BLOCK

ITERATIONS = 20
SAMPLE_BLOCKS = 1 << 16  # of 32; of wider ones fewer
_CHUNK = 1 << 10  # blocks of 32 whose terms are made at once: they stay in the processor's cache
LEAST_GAIN = 2.0**-12  # 0.001 dB; the twenty steps together gain two to ten times what the first one does


@dataclass(frozen=True)
class Part:
    """Sampled blocks of one tensor that have the same length.

    Attributes:
        w: float32, bfloat16 or float16 ``[n, length]``, length ``cut`` but for the short blocks at the ends of rows.
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
    """Levels, float32, and how much lower than with ``optimal`` the noise of the sample became, in dB."""

    levels: codebooks.Levels
    gain_db: float


def sample_positions(blocks: int, cut: int = BLOCK) -> npt.NDArray[np.int64]:
    """Which of ``blocks`` blocks a codebook is fitted to: ``floor(i * n / S)`` for i < S = min(n, 2^21 / cut)."""
    size = min(blocks, SAMPLE_BLOCKS * BLOCK // cut)
    return np.arange(size, dtype=np.int64) * blocks // max(size, 1)


def matrix_parts(
    w: Tensor,
    amax: Tensor,
    positions: npt.NDArray[np.int64],
    place: int = 0,
    importance: Tensor | None = None,
    cut: int = BLOCK,
) -> list[Part]:
    """The blocks ``positions`` of a matrix in memory, standing at ``place`` and after it among those sampled.

    Args:
        w: ``[rows, cols]``.
        amax: float32 ``[1]``, of the whole tensor.
        positions: int64, ascending; block b of row r has the position ``r * nblk + b``.
        place: where the first one stands.
        importance: float32 ``[G, cols]`` as in ``ops.quantize``.
        cut: columns of a block.
    """
    rows, cols = w.shape
    row, block = np.divmod(positions, -(-cols // cut))
    length = np.minimum(cols - block * cut, cut)
    places, parts = place + np.arange(len(positions)), []
    for size in np.unique(length)[::-1]:
        these = length == size
        at, of_row = (torch.from_numpy(index[these]).to(w.device) for index in (row, block))
        weights = None
        if importance is not None:
            weights = _blocks(importance, at // (rows // importance.shape[0]), of_row * cut, int(size))
        parts.append(Part(_blocks(w, at, of_row * cut, int(size)), amax, places[these], weights))
    return parts


def _blocks(matrix: Tensor, row: Tensor, column: Tensor, length: int) -> Tensor:
    """``[n, length]``: the ``length`` elements from ``column`` on of each of the rows ``row``."""
    cols = matrix.shape[1]
    if cols % length == 0 and length >= BLOCK:
        return matrix.reshape(-1, length)[row * (cols // length) + column // length]
    columns = column[:, None] + torch.arange(length, device=matrix.device)
    return matrix[row[:, None], columns]


def fit_tensor(w: Tensor, k: int, amax: Tensor, importance: Tensor | None = None, codec: Planes = PLANES) -> Fitted:
    """The ``fit`` codebook of a matrix ``[rows, cols]``; ``amax`` and ``importance`` as in ``ops.quantize``."""
    positions = sample_positions(w.shape[0] * -(-w.shape[1] // codec.cut), codec.cut)
    return fit(matrix_parts(w, amax, positions, importance=importance, cut=codec.cut), k, codec)


def fit(parts: Sequence[Part], k: int, codec: Planes = PLANES) -> Fitted:
    """Fit the levels of a codec to sampled blocks.

    Args:
        parts: the blocks, of the codec's ``cut``; their places together are 0 .. S - 1, each once.
        k: as in ``codec.levels``.
        codec: ``planes``, ``trellis`` or ``trellis/128``.
    """
    samples = [_Sample(codec, part, k) for part in parts]
    size = sum(len(part.place) for part in parts)
    start = levels = codec.normal_levels(k)
    for iteration in range(ITERATIONS):
        sums = _sums(samples, (size, codec.cut), levels, noise=iteration == 0)
        if iteration == 0 and sums.gain(levels) < LEAST_GAIN:
            return Fitted(start, 0.0)
        moved = sums.moved(levels)
        if np.array_equal(moved, levels):
            break  # the fixed point: what is left of the iterations would find it again
        levels = moved
    before, after = (sum(s.noise(c) for s in samples) for c in (start, levels))
    gain = 10 * math.log10(before / after) if before > 0 and after > 0 else 0.0
    return Fitted(levels, gain)


@dataclass(frozen=True)
class _Sums:
    """What one step needs, by level over the elements that take it: sums of ``w s v`` and of ``w s s``, float64.

    ``noise``: the sums of ``w (v - s c)^2``, the squared errors, where they were asked for.
    """

    above: npt.NDArray[np.float64]
    below: npt.NDArray[np.float64]
    noise: npt.NDArray[np.float64] | None

    def exact(self, levels: codebooks.Levels) -> npt.NDArray[np.float64]:
        """Where the error of the elements of each level is least; an empty level stays."""
        return np.divide(self.above, self.below, out=levels.astype(np.float64), where=self.below > 0)

    def moved(self, levels: codebooks.Levels) -> codebooks.Levels:
        """The levels after the step: sorted, normalised, float32."""
        exact = self.exact(levels)
        return codebooks.normalise(np.sort(exact)) if exact.any() else levels

    def gain(self, levels: codebooks.Levels) -> float:
        """The share of the squared error that goes when the levels move; infinite where there is no error."""
        assert self.noise is not None
        removed, whole = (self.below * (self.exact(levels) - levels) ** 2).sum(), self.noise.sum()
        return float(removed / whole) if whole > 0 else math.inf


def _sums(samples: Sequence[_Sample], shape: tuple[int, int], levels: codebooks.Levels, *, noise: bool) -> _Sums:
    """Sums over all blocks, one addition after the other in their order, which makes them the same everywhere.

    ``shape``: how many blocks, and of how many elements.
    """
    for sample in samples:
        sample.quantize(levels)
    count, (size, width) = levels.size, shape
    chunk = _CHUNK * BLOCK // width
    sums = np.zeros((3 if noise else 2, count))
    for first in range(0, size, chunk):
        blocks = min(chunk, size - first)
        # What lies past the end of a short block adds zero to level 0. The sums so far stand before the terms, so that
        # bincount, which adds in the order of the elements, goes on from them.
        index = np.zeros(count + blocks * width, np.intp)
        terms = np.zeros((len(sums), index.size))
        index[:count], terms[:, :count] = np.arange(count), sums
        for sample in samples:
            into = index[count:].reshape(-1, width), terms[:, count:].reshape(-1, blocks, width)
            sample.add_terms(first, levels, *into)
        sums = np.stack([np.bincount(index, term, count) for term in terms])
    return _Sums(sums[0], sums[1], sums[2] if noise else None)


class _Sample:
    """A part, and what of it stays the same from iteration to iteration."""

    def __init__(self, codec: Planes, part: Part, k: int) -> None:
        self.codec, self.part, self.k = codec, part, k
        self.length = part.w.shape[1]
        self.scales = decode_absmax_e4m4(torch.arange(1 << 8).byte()).double().numpy()
        self.weights = _error_weights(part.importance)

    def quantize(self, levels: codebooks.Levels) -> None:
        """Find out which level each element takes, and the scale of each block."""
        made = {name: part.cpu() for name, part in self._quantized(levels).items()}
        self.chosen = self.codec.indices(made, self.length).numpy()
        self.absmax = made[ABSMAX].numpy()
        self.to_blocks = 1 / float(made[CODEBOOK].abs().max())  # the tensor's power of two: what the level 1 became

    def add_terms(
        self, first: int, levels: codebooks.Levels, index: npt.NDArray[np.intp], terms: npt.NDArray[np.float64]
    ) -> None:
        """Write the level that each element takes, and its terms of ``_Sums``, for the places from ``first`` on.

        Args:
            first: place of the first row of ``index``.
            levels: those that were quantized with.
            index: ``[blocks, cut]``.
            terms: ``[2 or 3, blocks, cut]``.
        """
        begin, end = np.searchsorted(self.part.place, (first, first + len(index)))
        if begin == end:
            return
        at = self.part.place[begin:end] - first
        chosen = self.chosen[begin:end]
        values = (self.part.w[begin:end].float().cpu() * self.to_blocks).double().numpy()
        s = self.scales[self.absmax[begin:end]]
        weights = 1.0 if self.weights is None else self.weights[begin:end]
        index[at, : self.length] = chosen
        terms[0, at, : self.length] = weights * (s * values)
        terms[1, at, : self.length] = weights * np.broadcast_to(s * s, values.shape)
        if len(terms) > 2:
            terms[2, at, : self.length] = weights * (values - s * levels[chosen]) ** 2

    def noise(self, levels: codebooks.Levels) -> float:
        """The squared error of the part, not weighted, in units of its own tensor."""
        quantized = self._quantized(levels)
        return float(self.codec.stats(self.part.w, quantized).sum(0)[1])

    def _quantized(self, levels: codebooks.Levels) -> dict[str, Tensor]:
        part = self.part
        return self.codec.encode(part.w, Request(self.k, part.amax, "mse", torch.from_numpy(levels), part.importance))


def _error_weights(importance: Tensor | None) -> npt.NDArray[np.float64] | None:
    """Importance as the core sees it: a block of zeros counts as ones."""
    if importance is None:
        return None
    weights = importance.double().cpu().numpy()
    blocks = np.pad(weights, ((0, 0), (0, -weights.shape[1] % BLOCK))).reshape(len(weights), -1, BLOCK)
    ones = np.repeat(~blocks.any(axis=2), BLOCK, axis=1)[:, : weights.shape[1]]
    return np.where(ones, 1.0, weights)
