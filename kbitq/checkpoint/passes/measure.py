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
from kbitq.checkpoint.passes.output_errors import FeedbackMeter
from kbitq.checkpoint.passes.scan_pass import nonfinite_error
from kbitq.checkpoint.passes.tile_codec import TileCodec
from kbitq.checkpoint.plan.options import FITTED
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.sample import sampled
from kbitq.checkpoint.source.spans import Span
from kbitq.codecs.base import Coding, Request, for_dtype, get_codec, output_codec
from kbitq.format import DEFAULT_CODEC, element_count, matrix_shape

FULL = tuple((DEFAULT_CODEC, k) for k in (2, 3, 4))  # measured on all rows
REFERENCE = FULL[-1]
ROW_STEP = 16  # of the others one row in so many is measured,
FEW_ELEMENTS = 1 << 14  # or more, to have about this many elements


@dataclass
class Measured:
    """Squared errors of one tensor by (codec, K).

    Attributes:
        signal: sum of w^2, in all.
        noise: sum of (w - w')^2, in all.
        relative: what a budget is spent by: an error as a share of the same sum over the weights themselves, 0 to
            about 1. It is that of ``noise``, or weighted by column importance, or of the layer's outputs.
        elements: that were measured with error feedback; 0 where there is none.
    """

    signal: float = 0.0
    noise: dict[Coding, float] = field(default_factory=dict)
    relative: dict[Coding, float] = field(default_factory=dict)
    elements: float = 0.0


def measure(
    plan: Plan, codec: TileCodec, tensor: TensorPlan, codings: Sequence[Coding], feedback: FeedbackMeter | None = None
) -> Measured | str:
    """Measure a tensor in each of ``codings``, pairs of a codec and K, with its scale rule.

    A codebook that would be fitted counts as ``optimal``. With ``feedback``, a tensor that the plan's calibration
    knows is measured by the error of its layer's outputs.

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
    if feedback is not None and plan.hessian(tensor) is not None:
        return _of_outputs(tensor, feedback, codings, scan.amax)
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


def _of_outputs(tensor: TensorPlan, feedback: FeedbackMeter, codings: Sequence[Coding], amax: float) -> Measured:
    """The sample's errors, and its sums scaled to the whole tensor."""
    found = feedback.measure(tensor, [(coding, _levels(tensor, coding)) for coding in codings], amax)
    factor = element_count(tensor.shape) / found.elements
    noise = {coding: found.noise[coding] * factor for coding in codings}
    return Measured(found.signal * factor, noise, {c: found.relative(c) for c in codings}, float(found.elements))


def _levels(tensor: TensorPlan, coding: Coding, *, usual: bool = False) -> torch.Tensor | None:
    """The normalised levels of a coding, on the CPU; ``optimal`` for what would be fitted, or if ``usual``."""
    codec, k = coding
    levels = get_codec(codec).levels("optimal" if usual or tensor.codebook in FITTED else tensor.codebook, k)[0]
    return None if levels is None else torch.from_numpy(levels.copy())


class _Errors:
    """Errors of one tensor, added up span by span: in each coding over all rows or over every 16th."""

    def __init__(
        self, plan: Plan, codec: TileCodec, tensor: TensorPlan, codings: Sequence[Coding], amax: float
    ) -> None:
        self.tensor, self.device, self.wanted = tensor, codec.device, tuple(codings)
        alone = len(codings) == 1 or all(coding in FULL or output_codec(coding[0]) for coding in codings)
        self.full = self.wanted if alone else FULL
        self.codings = tuple(dict.fromkeys([*self.wanted, *([] if alone else [REFERENCE])]))
        self.columns = ColumnWeights(plan.importance)
        self.want_weighted = plan.options.budget is not None and plan.error_kind == "importance"
        self.amax = torch.tensor([amax], dtype=torch.float32, device=codec.device)
        self.levels = {c: self._on_device(_levels(tensor, c, usual=c not in self.wanted)) for c in self.codings}
        self.step = max(1, min(ROW_STEP, element_count(tensor.shape) // FEW_ELEMENTS))
        self.elements, self.signal, self.weighted_signal = 0, 0.0, 0.0
        self.all_rows = {coding: np.zeros(2) for coding in self.codings}  # noise, weighted noise
        self.some_rows = {coding: np.zeros(2) for coding in self.codings}

    def _on_device(self, levels: torch.Tensor | None) -> torch.Tensor | None:
        return None if levels is None else levels.to(self.device)

    def add(self, span: Span, w: torch.Tensor) -> None:
        """Measure the values ``[rows, cols]`` of a span."""
        w, weights = w.to(self.device), self.columns.of(self.tensor.name, self.tensor.shape, span)
        self.elements += w.numel()
        few = w[:: self.step].contiguous()
        weights = weights.to(self.device) if weights is not None else None
        few_weights = weights[:: self.step].contiguous() if weights is not None and len(weights) > 1 else weights
        self.weighted_signal += float(_weighted(w.double().square(), weights).sum()) if self.want_weighted else 0.0
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
        codec, levels = get_codec(for_dtype(coding[0], self.tensor.dtype)), self.levels[coding]
        parts = codec.encode(w, Request(coding[1], self.amax, self.tensor.scale, levels, weights))
        table = codec.stats(w, parts).cpu().numpy()
        table[:, 2] = table[:, 1]
        if self.want_weighted and weights is not None:
            error = (w.float() - codec.decode(parts, w.shape[1], torch.float32)).double().square()
            table[:, 2] = _weighted(error, weights).cpu().numpy()
        return table

    def result(self, factor: float) -> Measured:
        """The errors, times ``factor`` where only a sample was seen."""
        found = Measured(self.signal * factor)
        for coding in self.wanted:
            noise, weighted = self.all_rows[coding]
            if coding not in self.full:
                some, whole = self.some_rows[REFERENCE], self.all_rows[REFERENCE]
                ratio = np.divide(whole, some, out=np.full(2, float(self.step)), where=some > 0)
                noise, weighted = self.some_rows[coding] * ratio
            error, signal = (weighted, self.weighted_signal) if self.want_weighted else (noise, self.signal)
            found.noise[coding] = float(noise * factor)
            found.relative[coding] = float(error / signal) if signal > 0 else 0.0
        return found


def _weighted(squares: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """float64 ``[rows]``: squares ``[rows, cols]`` summed by row, weighted by ``[G, cols]``, G dividing the rows."""
    if weights is None:
        return squares.sum(1)
    if len(weights) > 1:
        weights = weights.repeat_interleave(len(squares) // len(weights), 0)
    return (squares * weights.double()).sum(1)
