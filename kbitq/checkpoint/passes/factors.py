"""The factor of each tensor's H, for error feedback: made when the tensor's turn comes, and kept while it lasts."""

from __future__ import annotations

import torch

from kbitq.calibration.statistics import Hessian
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.memory import feedback_elements
from kbitq.checkpoint.source.spans import Span
from kbitq.codecs import feedback
from kbitq.errors import CalibrationError
from kbitq.format import is_fused_experts, matrix_shape

_Key = tuple[tuple[str, ...], int]  # the tensors that share an H, and the expert


class Factors:
    """Factorises on one device; the last factor is kept, since the tiles of a tensor come one after the other.

    On a GPU the last but one too: files list ``k_proj, o_proj, q_proj``, of which the first and the third share an H.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        self._plan, self._device = plan, torch.device(device)
        self.damped: dict[str, float] = {}  # by tensor, where more damping than usual was needed
        self._kept: dict[_Key, feedback.Factor] = {}  # the last used at the end
        self._most = 2 if self._device.type == "cuda" else 1

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
        bound, on_gpu = self._plan.options.max_memory, self._device.type == "cuda"
        block = None if found is None else found.block
        return min(whole, max(1, feedback_elements(bound, cols, block, on_gpu=on_gpu) // cols))

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
        factor = self._kept.pop(key, None) or self._made(tensor.name, found, expert)
        self._kept[key] = factor
        if factor.damping > feedback.DAMPING:
            self.damped[tensor.name] = max(factor.damping, self.damped.get(tensor.name, 0.0))
        return factor

    def _made(self, name: str, found: Hessian, expert: int) -> feedback.Factor:
        while len(self._kept) >= self._most:  # before the next is made: two more may not fit
            del self._kept[next(iter(self._kept))]
        try:
            made = self._factorised(name, found, expert)
        except torch.OutOfMemoryError:  # tiles in flight have memory too, which they give back as they end
            self._kept.clear()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            made = self._factorised(name, found, expert)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # lanes read it on streams of their own
        return made

    def _factorised(self, name: str, found: Hessian, expert: int) -> feedback.Factor:
        return factorised(name, found.usable_triangle(expert, self._device), found.transposed, found.block)

    def notes(self) -> list[str]:
        """A sentence about what was damped more than usual, if anything was."""
        if not self.damped:
            return []
        name, most = max(self.damped.items(), key=lambda pair: pair[1])
        return [
            f"H of {len(self.damped)} tensors is only positive definite with more added to its diagonal than usual: "
            f"at most {most:g} of the mean, for {name}"
        ]


def factorised(name: str, h: torch.Tensor, transposed: bool, block: int | None = None) -> feedback.Factor:
    """The factor of a tensor's H, on its device. Raises CalibrationError, which names the tensor."""
    try:
        return feedback.factorise(h, transposed=transposed, block=block)
    except CalibrationError as error:
        raise CalibrationError(f"{name}: {error}") from None
