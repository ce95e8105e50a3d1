"""What each codec and K would cost the outputs of a tensor's layer, ``tr(E H E^T)``, with the error feedback of a run.

Rows of a matrix do not depend on each other, so evenly spaced runs of rows stand for all of them. Feedback goes from
left to right, so the first columns of a very wide matrix, with their part of H, are a matrix of the same kind. Of a
stack of experts a few stand for all. So all that is measured is measured with feedback, the same on every device, and
the work on a tensor is bounded: one factor of at most ``COLUMNS`` columns for each H, and about a sixteenth of the rows
in each codec and K, up to four million weights. A transposed weight is the same with rows and columns exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kbitq.checkpoint.passes.factors import factorised
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.memory import feedback_elements
from kbitq.checkpoint.source.sample import SAMPLE_RUN
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.codecs import feedback
from kbitq.codecs.base import Coding, Request, for_dtype, get_codec
from kbitq.format import block_count, is_fused_experts, matrix_shape

ROW_STEP = 16  # one row in so many is measured,
FEW_ELEMENTS = 1 << 18  # or more, to have about this many elements,
FEW_ROWS = 64  # and at least so many rows,
MOST_ELEMENTS = 1 << 22  # but no more than this
COLUMNS = 8192  # at most: factorising more takes minutes on a CPU
TRANSPOSED_ROWS = 2048  # at most: they are quantized one after the other
TRANSPOSED_RUN = 128  # columns side by side: a scale of every codec
EXPERTS = 8  # of a stack, at most


@dataclass
class OutputErrors:
    """Sums over the sample of one tensor.

    Attributes:
        elements: of the sample.
        signal: sum of w^2.
        output: ``tr(W H W^T)``.
        noise: by coding, sum of (w - w')^2.
        loss: by coding, ``tr(E H E^T)``.
    """

    elements: int = 0
    signal: float = 0.0
    output: float = 0.0
    noise: dict[Coding, float] = field(default_factory=lambda: defaultdict(float))
    loss: dict[Coding, float] = field(default_factory=lambda: defaultdict(float))

    def relative(self, coding: Coding) -> float:
        """``tr(E H E^T) / tr(W H W^T)``; 0 where the outputs are always 0."""
        return self.loss[coding] / self.output if self.output > 0 else 0.0


class FeedbackMeter:
    """Measures tensors of a plan with its calibration; what was made of the last H is kept, for those that share it."""

    def __init__(self, plan: Plan, reader: TileReader, device: str) -> None:
        self._plan, self._reader, self._device = plan, reader, device
        self._last: tuple[tuple[tuple[str, ...], int], torch.Tensor, feedback.Factor] | None = None

    def measure(
        self, tensor: TensorPlan, codings: Sequence[tuple[Coding, torch.Tensor | None]], amax: float
    ) -> OutputErrors:
        """Measure a finite tensor that there is an H for.

        Args:
            tensor: to measure.
            codings: codec and K, and its normalised levels, on the CPU.
            amax: the largest magnitude of the whole tensor.

        Raises:
            CalibrationError: H cannot be used; the message names the tensor.
        """
        found = OutputErrors()
        largest = torch.full((1,), amax, dtype=torch.float32, device=self._device)
        for expert in self._experts(tensor):
            for w, h, factor in self._parts(tensor, expert):
                found.elements += w.numel()
                found.signal += float(w.double().square().sum())
                found.output += feedback.proxy_loss(w, h, transposed=factor.transposed)
                for coding, levels in codings:
                    on_device = None if levels is None else levels.to(self._device)
                    error = _error(
                        for_dtype(coding[0], tensor.dtype),
                        w,
                        Request(coding[1], largest, tensor.scale, on_device),
                        factor,
                    )
                    found.noise[coding] += float(error.double().square().sum())
                    found.loss[coding] += feedback.proxy_loss(error, h, transposed=factor.transposed)
        return found

    def _parts(self, tensor: TensorPlan, expert: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, feedback.Factor]]:
        """The sample of one expert, in parts that fit into memory, each with its H in float64 and the factor of it."""
        found, bound = self._plan.hessian(tensor), self._plan.options.max_memory
        assert found is not None
        sample = self._columns(tensor, expert) if found.transposed else self._rows(tensor, expert)
        inputs, others = sample.shape if found.transposed else sample.shape[::-1]
        at_once = feedback_elements(bound, inputs) // inputs
        if found.transposed:
            at_once = max(1, at_once // TRANSPOSED_RUN) * TRANSPOSED_RUN
        h, factor = self._hessian(tensor, expert, inputs)
        for w in sample.split(min(at_once, others), dim=1 if found.transposed else 0):
            yield w.contiguous(), h, factor

    def _columns(self, tensor: TensorPlan, expert: int) -> torch.Tensor:
        """Evenly spaced runs of columns of one transposed expert, and their first rows, on the device."""
        source = self._plan.checkpoint.tensors[tensor.name]
        rows, cols = tensor.shape[-2:]
        height = min(rows, TRANSPOSED_ROWS)
        runs = min(max(-(-cols // ROW_STEP), FEW_ELEMENTS // height), MOST_ELEMENTS // height) // TRANSPOSED_RUN
        runs = max(1, min(runs, cols // TRANSPOSED_RUN))
        starts = [run * (cols // TRANSPOSED_RUN) // runs * TRANSPOSED_RUN for run in range(runs)]
        wanted = torch.cat([torch.arange(at, min(at + TRANSPOSED_RUN, cols)) for at in starts])
        step, gathered = max(1, self._reader.tile_bytes // (cols * source.stored_bits // 8)), []
        for first in range(0, height, step):
            row, count = expert * rows + first, min(step, height - first)
            span = Span(row * cols, row * block_count(cols), count, cols, True, True, cols)
            gathered.append(self._reader.read(source, span)[:, wanted])
        return torch.cat(gathered).to(self._device)

    def _experts(self, tensor: TensorPlan) -> list[int]:
        count = tensor.shape[0] if is_fused_experts(tensor.name, tensor.shape) else 1
        some = min(count, EXPERTS)
        return [i * count // some for i in range(some)]

    def _rows(self, tensor: TensorPlan, expert: int) -> torch.Tensor:
        """Evenly spaced runs of rows of one expert, and their first columns, on the device."""
        source = self._plan.checkpoint.tensors[tensor.name]
        rows, cols = matrix_shape(tensor.name, tensor.shape)
        if is_fused_experts(tensor.name, tensor.shape):
            rows = tensor.shape[1]
        width = min(cols, COLUMNS)
        wanted = min(max(-(-rows // ROW_STEP), FEW_ELEMENTS // width), MOST_ELEMENTS // width)
        wanted = min(rows, max(wanted, FEW_ROWS))
        length = min(wanted, SAMPLE_RUN if 2 * wanted <= rows else rows)
        runs = wanted // length
        gathered = []
        for run in range(runs):
            row = expert * rows + run * rows // runs
            span = Span(row * cols, row * block_count(cols), length, cols, True, True, cols)
            gathered.append(self._reader.read(source, span)[:, :COLUMNS].to(self._device, copy=True))
        return torch.cat(gathered)

    def _hessian(self, tensor: TensorPlan, expert: int, columns: int) -> tuple[torch.Tensor, feedback.Factor]:
        """H of the first inputs, in float64, and its factor."""
        found = self._plan.hessian(tensor)
        assert found is not None
        key = found.tensors, expert
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next is made: two may not fit
            h = found.usable(expert)[:columns, :columns].to(self._device)
            factor = factorised(tensor.name, h, found.transposed)
            self._last = key, h.double(), factor
        return self._last[1], self._last[2]


def _error(name: str, w: torch.Tensor, request: Request, factor: feedback.Factor) -> torch.Tensor:
    """What feedback leaves of rows, float32."""
    codec = get_codec(name)
    parts = feedback.encode(codec, w, request, factor)
    return w.float() - codec.decode(parts, w.shape[1], torch.float32)
