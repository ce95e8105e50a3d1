"""How parameters of a model are made from the tensors of its files.

transformers renames tensors between files and models, and stacks experts that files have one by one. The way of each
is found with transformers' own functions, so nothing here knows an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kbitq.checkpoint.source.open import SourceTensor
from kbitq.integrations.transformers.routes import stacks_rows


@dataclass
class Way:
    """How a parameter or buffer of a model is made from tensors of its files.

    Attributes:
        name: of the parameter.
        shape: of it.
        parts: names in the files. Each list is stacked, and the stacks are concatenated by rows.
        stacked: whether that is so; else the one tensor is the parameter.
    """

    name: str
    shape: tuple[int, ...]
    parts: list[list[str]] = field(default_factory=list)
    stacked: bool = False


def find_ways(model: Any, tensors: Mapping[str, SourceTensor]) -> list[Way]:
    """How each parameter and buffer is made from the files, in the model's order.

    Left out are those that are made in another way than by taking a tensor, or stacking tensors.
    """
    given = get_model_conversion_mapping(model)
    renamings = [c for c in given if isinstance(c, WeightRenaming)]
    converters = [c for c in given if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    plain: dict[str, str] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for tensor in tensors.values():
        name, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, state)
        if name in state and pattern is None and tuple(state[name].shape) == tensor.shape:
            plain[name] = tensor.name
        elif name in state and pattern is not None and stacks_rows(by_pattern.get(str(pattern))):
            of_target = parts.setdefault(name, {str(p): [] for p in by_pattern[str(pattern)].source_patterns})
            of_target[str(pattern)].append(tensor.name)
    ways = []
    for name, held in state.items():
        if name in plain:
            ways.append(Way(name, tuple(held.shape), [[plain[name]]]))
        elif name in parts:
            ordered = [sorted(part, key=_by_number) for part in parts[name].values()]
            ways.append(Way(name, tuple(held.shape), ordered, stacked=True))
    return ways


def _by_number(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
