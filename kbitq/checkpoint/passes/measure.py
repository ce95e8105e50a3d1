"""What each codec and K would cost a tensor, at a price below three quantizations of K = 5.

K = 2 to 4 of ``planes`` are measured in full. The search at a higher K, and that of the trellis at any, takes longer
than all of those together, and by how much its error differs from that of K = 4 is nearly the same in all rows. So it
is measured on every 16th row and scaled by what K = 4 has on all rows over what it has there.
"""

from __future__ import annotations

import math
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
from kbitq.codecs.base import Coding, Request, get_codec
from kbitq.format import DEFAULT_CODEC, element_count, matrix_shape

FULL = tuple((DEFAULT_CODEC, k) for k in (2, 3, 4))  # measured on all rows
REFERENCE = FULL[-1]
ROW_STEP = 16  # of the others one row in so many is measured,
FEW_ELEMENTS = 1 << 14  # or more, to have about this many elements


@dataclass
class Measured:
    """Squared errors of one tensor by (codec, K), in all; ``weighted`` by column importance, where that is wanted."""

    signal: float = 0.0
    noise: dict[Coding, float] = field(default_factory=dict)
    weighted: dict[Coding, float] = field(default_factory=dict)


def measure(plan: Plan, codec: TileCodec, tensor: TensorPlan, codings: Sequence[Coding]) -> Measured | str:
    """Measure a tensor in each of ``codings``, pairs of a codec and K, with its scale rule.

    A codebook that would be fitted counts as ``optimal``.

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
    errors = _Errors(plan, codec, tensor, codings, scan.amax)
    cut = math.lcm(*(get_codec(name).cut for name, _ in codings))
    rows, cols = matrix_shape(tensor.name, tensor.shape)
    if plan.options.budget.sample and plan.importance is None:
        for span, w in sampled(codec.reader, source, cut):
            errors.add(span, w)
        return errors.result(element_count(tensor.shape) / errors.elements)
    for span in codec.reader.spans(source, cut=cut):
        errors.add(span, codec.reader.read(source, span))
    return errors.result(rows * cols / errors.elements)


class _Errors:
    """Errors of one tensor, added up span by span: in each coding over all rows or over every 16th."""

    def __init__(
        self, plan: Plan, codec: TileCodec, tensor: TensorPlan, codings: Sequence[Coding], amax: float
    ) -> None:
        self.tensor, self.device, self.wanted = tensor, codec.device, tuple(codings)
        alone = len(codings) == 1 or all(coding in FULL for coding in codings)
        self.full = self.wanted if alone else FULL
        self.codings = tuple(dict.fromkeys([*self.wanted, *([] if alone else [REFERENCE])]))
        self.columns = ColumnWeights(plan.importance)
        self.want_weighted = plan.options.budget is not None and plan.options.budget.error == "importance"
        self.amax = torch.tensor([amax], dtype=torch.float32, device=codec.device)
        self.levels = {coding: self._levels(*coding) for coding in self.codings}
        self.step = max(1, min(ROW_STEP, element_count(tensor.shape) // FEW_ELEMENTS))
        self.elements, self.signal = 0, 0.0
        self.all_rows = {coding: np.zeros(2) for coding in self.codings}  # noise, weighted noise
        self.some_rows = {coding: np.zeros(2) for coding in self.codings}

    def _levels(self, codec: str, k: int) -> torch.Tensor | None:
        fitted = self.tensor.codebook in FITTED or (codec, k) not in self.wanted
        levels = get_codec(codec).levels("optimal" if fitted else self.tensor.codebook, k)[0]
        return None if levels is None else torch.from_numpy(levels.copy()).to(self.device)

    def add(self, span: Span, w: torch.Tensor) -> None:
        """Measure the values ``[rows, cols]`` of a span."""
        w, weights = w.to(self.device), self.columns.of(self.tensor.name, self.tensor.shape, span)
        self.elements += w.numel()
        few = w[:: self.step].contiguous()
        weights = weights.to(self.device) if weights is not None else None
        few_weights = weights[:: self.step].contiguous() if weights is not None and len(weights) > 1 else weights
        whole = True  # no signal was added yet
        for coding in self.codings:
            if coding in self.full:
                table = self._errors(w, weights, coding)
                self.all_rows[coding] += table[:, 1:].sum(0)
                self.some_rows[coding] += table[:: self.step, 1:].sum(0)
                self.signal += float(table[:, 0].sum()) if whole else 0.0
                whole = False
            else:
                table = self._errors(few, few_weights, coding)
                self.some_rows[coding] += table[:, 1:].sum(0)

    def _errors(self, w: torch.Tensor, weights: torch.Tensor | None, coding: Coding) -> np.ndarray:
        """float64 ``[rows, 3]``: sum w^2, sum (w - w')^2, and the latter weighted."""
        codec, levels = get_codec(coding[0]), self.levels[coding]
        parts = codec.encode(w, Request(coding[1], self.amax, self.tensor.scale, levels, weights))
        table = codec.stats(w, parts).cpu().numpy()
        table[:, 2] = table[:, 1]
        if self.want_weighted and weights is not None:
            error = (w.float() - codec.decode(parts, w.shape[1], torch.float32)).double().square()
            by_row = weights.double().repeat_interleave(len(w) // len(weights), 0) if len(weights) > 1 else weights
            table[:, 2] = (error * by_row).sum(1).cpu().numpy()
        return table

    def result(self, factor: float) -> Measured:
        """The errors, times ``factor`` where only a sample was seen."""
        unit = self.columns.unit(self.tensor.name, self.tensor.shape) if self.want_weighted else 1.0
        found = Measured(self.signal * factor)
        for coding in self.wanted:
            noise, weighted = self.all_rows[coding]
            if coding not in self.full:
                some, whole = self.some_rows[REFERENCE], self.all_rows[REFERENCE]
                ratio = np.divide(whole, some, out=np.full(2, float(self.step)), where=some > 0)
                noise, weighted = self.some_rows[coding] * ratio
            found.noise[coding], found.weighted[coding] = float(noise * factor), float(weighted * factor * unit)
        return found
