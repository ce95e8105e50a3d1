"""Which parameters of a model are what tensors of its files, of those that the default selection would quantize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kbitq.checkpoint.source.open import SourceTensor
from kbitq.choose.selection import Selection
from kbitq.format import is_fused_experts
from kbitq.integrations.transformers.ways import find_ways

_LEAST_K = 2  # which K is chosen later; what fewest bits would not shrink, no K does


@dataclass
class Weight:
    """A parameter of a model, a matrix ``[a, b]`` or a stack of experts ``[E, a, b]``, and what it is made of.

    ``sources``: name in the files -> which expert it is; None where the tensor is all of the parameter.
    """

    name: str
    shape: tuple[int, ...]
    sources: dict[str, int | None] = field(default_factory=dict)

    @property
    def experts(self) -> int | None:
        """Number of experts; None of a matrix."""
        return self.shape[0] if len(self.shape) == 3 else None

    @property
    def columns(self) -> int:
        return self.shape[-1]


def find_weights(model: Any, tensors: Mapping[str, SourceTensor]) -> tuple[list[Weight], list[str]]:
    """The weights of a model that the default selection would quantize, in the order of its parameters.

    Args:
        model: a transformers model, of which only names and shapes are looked at.
        tensors: of its files.

    Returns:
        The weights, and the names in the files of those that are neither a matrix of the model nor part of a stack.
    """
    selection = Selection(_LEAST_K)
    wanted = {t.name for t in tensors.values() if selection.verdict(t.name, t.shape, t.dtype).quantize}
    found = []
    for way in find_ways(model, tensors):
        if len(way.shape) == 2 or is_fused_experts(way.name, way.shape):
            placed = {s: i if way.stacked else None for part in way.parts for i, s in enumerate(part) if s in wanted}
            found += [Weight(way.name, way.shape, placed)] if placed else []
    known = {source for weight in found for source in weight.sources}
    return found, [name for name in tensors if name in wanted - known]
