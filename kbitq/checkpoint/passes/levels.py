"""The codebook of each tensor of a run, fitted where that is asked for, and the importance of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kbitq import ops
from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.choose.importance import Importance
from kbitq.choose.tensor_names import role_of
from kbitq.codecs import fit
from kbitq.codecs.base import get_codec
from kbitq.codecs.planes import Planes
from kbitq.errors import CodebookError
from kbitq.format import element_count, matrix_shape


class LevelSource:
    """Gives levels tensor by tensor. Fitting reads a tensor once more; what was fitted last is kept.

    The first pass of the run must be over: a tensor's largest magnitude sets the power of two of its blocks.
    """

    def __init__(
        self,
        plan: Plan,
        reader: TileReader,
        device: str,
        scans: Mapping[str, Scan],
        known: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """``known``: codebooks that were fitted before, by their ``fit_key``."""
        self._plan, self._reader, self._device, self._scans = plan, reader, device, scans
        self._columns = ColumnWeights(plan.importance)
        self._last: tuple[str, torch.Tensor] = ("", torch.empty(0))
        self._shared: dict[str, torch.Tensor] = dict(known or {})
        self._gains: dict[str, float] = {}

    def levels(self, tensor: TensorPlan) -> torch.Tensor | None:
        """The normalised levels of a tensor to be quantized, float32; None where its codec has none."""
        assert tensor.k is not None
        family = family_of(tensor)
        if not family:
            given = self._plan.levels[tensor.codebook, tensor.k, tensor.codec][0]
            return None if given is None else torch.from_numpy(given.copy())
        key = fit_key(tensor)
        if key in self._shared:
            return self._shared[key]
        if family == (tensor.name,):
            if self._last[0] != tensor.name:
                self._last = tensor.name, self._fitted([tensor], tensor.k)
            return self._last[1]
        self._shared[key] = self._fitted(fitted_together(self._plan, tensor), tensor.k)
        return self._shared[key]

    def importance(self, tensor: TensorPlan, span: Span) -> torch.Tensor | None:
        """The importance of a span's columns, as ``ops.quantize`` takes it."""
        return self._columns.of(tensor.name, tensor.shape, span)

    @property
    def fit_gain_db(self) -> float | None:
        """How much lower the noise of the fitted tensors became than with ``optimal``, in dB; None if none was fitted.

        The mean of the gains measured on the fitted blocks, by elements.
        """
        return mean_gain_db(self._plan, self._gains)

    @property
    def gains(self) -> Mapping[str, float]:
        """The same by tensor."""
        return self._gains

    def _fitted(self, tensors: Sequence[TensorPlan], k: int) -> torch.Tensor:
        codec = get_codec(tensors[0].codec)
        if not isinstance(codec, Planes):
            raise CodebookError(f"the codec {codec.name} has no levels that could be fitted")
        counts = [rows * -(-cols // codec.cut) for rows, cols in (matrix_shape(t.name, t.shape) for t in tensors)]
        positions = fit.sample_positions(sum(counts), codec.cut)
        parts, first, place = [], 0, 0
        for tensor, count in zip(tensors, counts, strict=True):
            mine = positions[place : np.searchsorted(positions, first + count)] - first
            parts += self._parts(tensor, mine, place, codec.cut)
            first, place = first + count, place + len(mine)
        fitted = fit.fit(parts, k, codec)
        self._gains.update({t.name: fitted.gain_db for t in tensors})
        return torch.from_numpy(fitted.levels)

    def _parts(self, tensor: TensorPlan, positions: np.ndarray, place: int, cut: int) -> list[fit.Part]:
        """The blocks ``positions`` of one tensor; all of it is read, which is quicker than many small reads."""
        source, device = self._plan.checkpoint.tensors[tensor.name], self._device
        amax = torch.tensor([self._scans[tensor.name].amax], dtype=torch.float32, device=device)
        parts: list[fit.Part] = []
        for span in self._reader.spans(source, cut=cut):
            first, count = span.units(cut)
            low, high = np.searchsorted(positions, (first, first + count))
            if low < high:
                w = self._reader.read(source, span).to(device)
                weights = self._columns.of(tensor.name, tensor.shape, span)
                weights = weights.to(device) if weights is not None else None
                parts += fit.matrix_parts(w, amax, positions[low:high] - first, place + int(low), weights, cut)
        return parts


def mean_gain_db(plan: Plan, gains: Mapping[str, float]) -> float | None:
    """The mean of gains by tensor, by elements; None where there are none."""
    sizes = {t.name: element_count(t.shape) for t in plan.tensors if t.name in gains}
    whole = sum(sizes.values())
    return sum(gains[name] * size for name, size in sizes.items()) / whole if whole else None


def family_of(tensor: TensorPlan) -> tuple[str, ...]:
    """What the tensors have in common that a codebook is fitted to together; empty where none is fitted."""
    families = {"fit": (tensor.name,), "fit-shared": ("role", role_of(tensor.name), tensor.codec)}
    return families.get(tensor.codebook, ()) if tensor.quantized else ()


def fit_key(tensor: TensorPlan) -> str:
    """What the fitted levels of a tensor are kept under: its family and K."""
    return f"{tensor.k} {' '.join(family_of(tensor))}"


def fitted_together(plan: Plan, tensor: TensorPlan) -> list[TensorPlan]:
    """The tensors that the levels of one are fitted to, whatever their K, in order of name."""
    return sorted((t for t in plan.tensors if family_of(t) == family_of(tensor)), key=lambda t: t.name)


class ColumnWeights:
    """The importance of the columns of each span of tensors; that of the last tensor is kept."""

    def __init__(self, importance: Importance | None) -> None:
        self._importance = importance
        self._last: tuple[str, torch.Tensor | None] = ("", None)

    def of(self, name: str, shape: Sequence[int], span: Span) -> torch.Tensor | None:
        """float32 ``[G, cols]`` of a span, G dividing its rows; None where all columns count the same."""
        weights = self._prepared(name, shape)
        if weights is None:
            return None
        rows, cols = matrix_shape(name, shape)
        first, column = divmod(span.first_element, cols)
        per_expert = rows // weights.shape[0]
        if not span.whole_rows:  # each "row" of the span is a block of one row
            run = weights[first // per_expert, column : column + span.numel]
            return run.reshape(span.rows, span.cols).contiguous()
        expert = torch.arange(first, first + span.rows) // per_expert
        if expert[0] == expert[-1]:
            return weights[expert[0]][None].contiguous()
        return weights[expert]

    def _prepared(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        if self._importance is None:
            return None
        if self._last[0] != name:
            values = self._importance.of(name, shape)
            found = None if values is None else ops.prepare_importance(torch.from_numpy(values))
            self._last = name, found
        return self._last[1]
