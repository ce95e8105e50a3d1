"""How a budget was spent: what was chosen, what it costs, and what else there was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kbitq.choose.knapsack import Budget
from kbitq.codecs.base import Coding
from kbitq.format import DEFAULT_CODEC


@dataclass(frozen=True)
class Choice:
    """How a budget was spent.

    Attributes:
        bits_per_weight: of the choice; bytes of packed words and scale bytes, codebooks apart.
        weight_bytes: of all weight files of the output.
        sqnr_db: expected over all quantized tensors, from the measurement.
        error_kind: what was made small, as ``Budget.error`` names it; not ``auto``.
        error: of the choice, by that measure; ``bound``: no choice within the budget has less.
        uniform: the codec and K that, given to every tensor, have the least error within the budget; None if none fit.
        uniform_error: its error.
        curve: (bits per weight, error) of the best choices from the smallest to the largest.
        groups: tensors that were tied to one K, by their key, where there is more than one.
        feedback_share: of the quantized weights, the share whose layers' outputs were measured with error feedback, on
            a sample of their rows; and the share that the sample is of them. None without a calibration.
    """

    budget: Budget
    error_kind: str
    bits_per_weight: float
    weight_bytes: int
    sqnr_db: float | None
    error: float
    bound: float
    uniform: Coding | None
    uniform_error: float | None
    curve: list[tuple[float, float]]
    groups: dict[str, list[str]]
    feedback_share: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        wanted = {"bpw": self.budget.bpw} if self.budget.bpw is not None else {"size": self.budget.size}
        return {
            **wanted, "weights": self.error_kind, "bits_per_weight": self.bits_per_weight,
            "weight_bytes": self.weight_bytes, "sqnr_db": self.sqnr_db, "error": self.error, "bound": self.bound,
            "uniform_k": None if self.uniform is None else self.uniform[1], "uniform_error": self.uniform_error,
            **({} if self.uniform is None or self.uniform[0] == DEFAULT_CODEC else {"uniform_codec": self.uniform[0]}),
            "curve": [{"bits_per_weight": bits, "error": error} for bits, error in self.curve],
            "tied": self.groups, **self._feedback(),
        }  # fmt: skip

    def _feedback(self) -> dict[str, Any]:
        if self.feedback_share is None:
            return {}
        return dict(zip(("measured_with_feedback", "measured_sample"), self.feedback_share, strict=True))
