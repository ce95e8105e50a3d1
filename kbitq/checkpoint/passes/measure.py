"""What each K would cost a tensor, at a price below three quantizations of K = 5.

K = 2 to 4 are measured in full. The search at a higher K takes longer than all of those together, and how much lower
its error is than that of K = 4 hardly differs from row to row, so it is measured on every 16th row and scaled by what
K = 4 has on all rows over what it has there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kbitq.checkpoint.passes.levels import ColumnWeights
from kbitq.checkpoint.passes.scan_pass import nonfinite_error
from kbitq.checkpoint.passes.tile_codec import TileCodec
from kbitq.checkpoint.plan.options import FITTED
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.sample import sampled
from kbitq.checkpoint.source.spans import Span
from kbitq.codecs.base import Request, get_codec
from kbitq.format import element_count, matrix_shape

FULL_KS = (2, 3, 4)  # measured on all rows
ROW_STEP = 16  # of the others one row in so many is measured,
FEW_ELEMENTS = 1 << 14  # or more, to have about this many elements


@dataclass
class Measured:
    """Squared errors of one tensor by K, in all; ``weighted`` by column importance, where that is asked for."""

    signal: float = 0.0
    noise: dict[int, float] = field(default_factory=dict)
    weighted: dict[int, float] = field(default_factory=dict)


def measure(plan: Plan, codec: TileCodec, tensor: TensorPlan, ks: Sequence[int]) -> Measured | str:
    """Measure a tensor at each of ``ks``, with its scale rule; a codebook that would be fitted counts as ``optimal``.

    Returns the reason to keep the tensor where it is not finite and the plan's options say to keep such tensors.
    Raises NonFiniteError where they say to stop.
    """
    assert plan.options.budget is not None
    source = plan.checkpoint.tensors[tensor.name]
    scan = codec.scan(source)
    if scan.nonfinite:
        if plan.options.on_nonfinite == "error":
            raise nonfinite_error(plan.checkpoint, source, scan)
        return f"{scan.nonfinite} values are not finite"
    errors = _Errors(plan, codec, tensor, ks, scan.amax)
    rows, cols = matrix_shape(tensor.name, tensor.shape)
    if plan.options.budget.sample and plan.importance is None:
        for span, w in sampled(codec.reader, source, get_codec(tensor.codec).cut):
            errors.add(span, w)
        return errors.result(element_count(tensor.shape) / errors.elements)
    for span in codec.reader.spans(source, cut=get_codec(tensor.codec).cut):
        errors.add(span, codec.reader.read(source, span))
    return errors.result(rows * cols / errors.elements)


class _Errors:
    """Errors of one tensor, added up span by span: at each K over all rows or over every 16th."""

    def __init__(self, plan: Plan, codec: TileCodec, tensor: TensorPlan, ks: Sequence[int], amax: float) -> None:
        self.tensor, self.ks, self.device = tensor, tuple(ks), codec.device
        self.columns = ColumnWeights(plan.importance)
        self.want_weighted = plan.options.budget is not None and plan.options.budget.error == "importance"
        self.amax = torch.tensor([amax], dtype=torch.float32, device=codec.device)
        self.codec = get_codec(tensor.codec)
        self.levels = {k: self._levels(k) for k in ks}
        self.step = max(1, min(ROW_STEP, element_count(tensor.shape) // FEW_ELEMENTS))
        self.elements, self.signal = 0, 0.0
        self.all_rows = {k: np.zeros(2) for k in ks}  # noise, weighted noise
        self.some_rows = {k: np.zeros(2) for k in ks}

    def _levels(self, k: int) -> torch.Tensor | None:
        spec = "optimal" if self.tensor.codebook in FITTED else self.tensor.codebook
        levels = self.codec.levels(spec, k)[0]
        return None if levels is None else torch.from_numpy(levels.copy()).to(self.device)

    def add(self, span: Span, w: torch.Tensor) -> None:
        """Measure the values ``[rows, cols]`` of a span."""
        w, weights = w.to(self.device), self.columns.of(self.tensor.name, self.tensor.shape, span)
        self.elements += w.numel()
        few = w[:: self.step].contiguous()
        weights = weights.to(self.device) if weights is not None else None
        few_weights = weights[:: self.step].contiguous() if weights is not None and len(weights) > 1 else weights
        for k in self.ks:
            if k in FULL_KS or len(self.ks) == 1:
                table = self._errors(w, weights, k)
                self.all_rows[k] += table[:, 1:].sum(0)
                self.some_rows[k] += table[:: self.step, 1:].sum(0)
            else:
                table = self._errors(few, few_weights, k)
                self.some_rows[k] += table[:, 1:].sum(0)
            if k == self.ks[0]:
                self.signal += float(table[:, 0].sum())

    def _errors(self, w: torch.Tensor, weights: torch.Tensor | None, k: int) -> np.ndarray:
        """float64 ``[rows, 3]``: sum w^2, sum (w - w')^2, and the latter weighted."""
        parts = self.codec.encode(w, Request(k, self.amax, self.tensor.scale, self.levels[k], weights))
        table = self.codec.stats(w, parts).cpu().numpy()
        table[:, 2] = table[:, 1]
        if self.want_weighted and weights is not None:
            error = (w.float() - self.codec.decode(parts, w.shape[1], torch.float32)).double().square()
            by_row = weights.double().repeat_interleave(len(w) // len(weights), 0) if len(weights) > 1 else weights
            table[:, 2] = (error * by_row).sum(1).cpu().numpy()
        return table

    def result(self, factor: float) -> Measured:
        """The errors, times ``factor`` where only a sample was seen."""
        unit = self.columns.unit(self.tensor.name, self.tensor.shape) if self.want_weighted else 1.0
        found = Measured(self.signal * factor)
        reference = max((k for k in self.ks if k in FULL_KS), default=None)
        for k in self.ks:
            noise, weighted = self.all_rows[k]
            if not (k in FULL_KS or len(self.ks) == 1):
                assert reference is not None
                some, whole = self.some_rows[reference], self.all_rows[reference]
                ratio = np.divide(whole, some, out=np.full(2, float(self.step)), where=some > 0)
                noise, weighted = self.some_rows[k] * ratio
            found.noise[k], found.weighted[k] = float(noise * factor), float(weighted * factor * unit)
        return found
