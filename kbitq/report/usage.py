"""How a quantized tensor uses what it has: which scale bytes, which levels, and how its weights lie among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kbitq.checkpoint.source.open import Checkpoint
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.compare import matching_source
from kbitq.checkpoint.written.stored import QuantizedCheckpoint, StoredTensor, read_constants, read_span
from kbitq.codecs.planes import ABSMAX, CODEBOOK, Planes
from kbitq.codecs.scales import decode_absmax_e4m4
from kbitq.errors import CodecError

WEIGHT_BINS = 120
WEIGHT_RANGE = 1.5  # of a weight over its block's scale; the largest level is 1

Counts = npt.NDArray[np.int64]


@dataclass
class Usage:
    """Counts over one tensor.

    Attributes:
        levels: float ``[2^K]``, the normalised codebook.
        scales: ``[256]``, blocks by scale byte.
        indices: ``[2^K]``, elements by level.
        weights: ``[WEIGHT_BINS]``, elements by weight over scale from -WEIGHT_RANGE to it; None without the source.
    """

    levels: npt.NDArray[np.float32]
    scales: Counts = field(default_factory=lambda: np.zeros(256, np.int64))
    indices: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    weights: Counts | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "levels": [round(float(level), 5) for level in self.levels],
            "scales": self.scales.tolist(), "indices": self.indices.tolist(),
            "weights": None if self.weights is None else self.weights.tolist(),
        }  # fmt: skip


def usage(
    opened: QuantizedCheckpoint,
    names: list[str],
    source: Checkpoint | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Usage]:
    """Count over all of the tensors ``names``; with the source their weights too."""
    tensors = [opened.tensors[name] for name in names]
    meter = ProgressMeter(progress, sum(t.nbytes for t in tensors))
    found = {}
    with TileReader(opened.checkpoint) as stored, TileReader(source or opened.checkpoint) as plain:
        for tensor in tensors:
            found[tensor.name] = _counted(stored, tensor, plain if source is not None else None)
            meter.add(tensor.nbytes, tensor.name)
    return found


def _counted(stored: TileReader, tensor: StoredTensor, plain: TileReader | None) -> Usage:
    constants, meta, codec = read_constants(stored, tensor), tensor.meta, tensor.codec
    if not isinstance(codec, Planes):
        raise CodecError(f"the codec {codec.name} has no scale bytes and levels that could be counted")
    codebook = constants[CODEBOOK]
    unit = float(codebook.abs().max()) or 1.0
    counts = Usage((codebook / unit).numpy(), indices=np.zeros(codebook.numel(), np.int64))
    original = matching_source(plain.checkpoint, tensor) if plain is not None else None
    for span in stored.matrix_spans(tensor.name, meta.shape, meta.dtype, cut=codec.cut):
        parts = read_span(stored, tensor, span, constants)
        absmax = parts[ABSMAX]
        counts.scales += np.bincount(absmax.numpy().ravel(), minlength=256)
        index = codec.indices(parts, span.cols)
        counts.indices += np.bincount(index.numpy().ravel(), minlength=codebook.numel())
        if plain is not None and original is not None:
            scale = decode_absmax_e4m4(absmax).repeat_interleave(codec.cut, dim=1)[:, : span.cols] * unit
            over = (plain.read(original, span).float() / scale)[scale > 0]
            histogram = torch.histc(over, WEIGHT_BINS, -WEIGHT_RANGE, WEIGHT_RANGE).to(torch.int64).numpy()
            counts.weights = histogram if counts.weights is None else counts.weights + histogram
    return counts
