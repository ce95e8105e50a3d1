"""Which parameters of a model are what tensors of its files, of those that the default selection would quantize.

transformers renames tensors between files and models, and stacks experts that files have one by one. The way of each
is found with transformers' own functions, so nothing here knows an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kbitq.checkpoint.source.open import SourceTensor
from kbitq.choose.selection import Selection
from kbitq.format import is_fused_experts
from kbitq.integrations.transformers.routes import stacks_rows

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
    wanted = [t for t in tensors.values() if selection.verdict(t.name, t.shape, t.dtype).quantize]
    given = get_model_conversion_mapping(model)
    renamings = [c for c in given if isinstance(c, WeightRenaming)]
    converters = [c for c in given if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state, shapes = model.state_dict(), {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Weight] = {}
    parts: dict[tuple[str, str], list[str]] = {}
    left_out = []
    for tensor in wanted:
        name, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, state)
        shape, converter = shapes.get(name), by_pattern.get(str(pattern))
        if shape is None or not _is_matrix_or_stack(name, shape):
            left_out.append(tensor.name)
        elif converter is None and shape == tensor.shape:
            found.setdefault(name, Weight(name, shape)).sources[tensor.name] = None
        elif len(shape) == 3 and len(tensor.shape) == 2 and stacks_rows(converter):
            found.setdefault(name, Weight(name, shape))
            parts.setdefault((name, str(pattern)), []).append(tensor.name)
        else:
            left_out.append(tensor.name)
    for (name, _), sources in parts.items():  # one list for the gates of all experts, one for the ups
        found[name].sources.update({source: i for i, source in enumerate(sorted(sources, key=_by_number))})
    return sorted(found.values(), key=_order_of(shapes)), left_out


def _is_matrix_or_stack(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or is_fused_experts(name, shape)


def _order_of(names: Iterable[str]) -> Any:
    places = {name: i for i, name in enumerate(names)}
    return lambda weight: places[weight.name]


def _by_number(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
