"""The factor of each tensor's H, for error feedback: made when the tensor's turn comes, and kept while it lasts."""

from __future__ import annotations

import torch

from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.memory import feedback_elements
from kbitq.checkpoint.source.spans import Span
from kbitq.codecs import feedback
from kbitq.errors import CalibrationError
from kbitq.format import is_fused_experts, matrix_shape


class Factors:
    """Factorises on one device; the last factor is kept, since the tiles of a tensor come one after the other."""

    def __init__(self, plan: Plan, device: str) -> None:
        self._plan, self._device = plan, device
        self.damped: dict[str, float] = {}  # by tensor, where more damping than usual was needed
        self._last: tuple[tuple[str, ...], int, feedback.Factor] | None = None

    def has(self, tensor: TensorPlan) -> bool:
        """Whether a tensor is quantized with error feedback."""
        return self._plan.hessian(tensor) is not None

    def rows_of_tile(self, tensor: TensorPlan) -> int:
        """Rows of a tile: at least one, and never of two experts. Of a transposed weight all, as each depends on those
        above it."""
        found, cols = self._plan.hessian(tensor), matrix_shape(tensor.name, tensor.shape)[1]
        whole = self.rows_of_expert(tensor)
        if found is not None and found.transposed:
            return whole
        return min(whole, max(1, feedback_elements(self._plan.options.max_memory, cols) // cols))

    def rows_of_expert(self, tensor: TensorPlan) -> int:
        """Rows that share an H."""
        fused = is_fused_experts(tensor.name, tensor.shape)
        return tensor.shape[1] if fused else matrix_shape(tensor.name, tensor.shape)[0]

    def of(self, tensor: TensorPlan, span: Span) -> feedback.Factor | None:
        """The factor for a span of whole rows of one expert; None where there is no H.

        Raises CalibrationError, which names the tensor, for an H that cannot be used.
        """
        found = self._plan.hessian(tensor)
        if found is None:
            return None
        expert = span.first_element // span.row_length // self.rows_of_expert(tensor) if found.experts > 1 else 0
        key = tuple(found.tensors), expert
        if self._last is None or self._last[:2] != key:
            made = factorised(tensor.name, found.usable(expert).to(self._device), found.transposed)
            self._last = (*key, made)
        if (damping := self._last[2].damping) > feedback.DAMPING:
            self.damped[tensor.name] = max(damping, self.damped.get(tensor.name, 0.0))
        return self._last[2]

    def notes(self) -> list[str]:
        """A sentence about what was damped more than usual, if anything was."""
        if not self.damped:
            return []
        name, most = max(self.damped.items(), key=lambda pair: pair[1])
        return [
            f"H of {len(self.damped)} tensors is only positive definite with more added to its diagonal than usual: "
            f"at most {most:g} of the mean, for {name}"
        ]


def factorised(name: str, h: torch.Tensor, transposed: bool) -> feedback.Factor:
    """The factor of a tensor's H, on its device. Raises CalibrationError, which names the tensor."""
    try:
        return feedback.factorise(h, transposed=transposed)
    except CalibrationError as error:
        raise CalibrationError(f"{name}: {error}") from None
