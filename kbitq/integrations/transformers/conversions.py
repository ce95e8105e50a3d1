"""Weight conversions for transformers' loader: exact routes for packed tensors, decoding on load, splitting on save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

from kbitq import format as fmt
from kbitq import ops
from kbitq.codecs.base import get_codec, part_kinds, part_names

GUARD_ROUTE = "__kbitq_guard__"
"""Where the guard tensor of a folder is sent: no parameter has this name, and load reports leave it out."""


class _Shared:
    """transformers copies a conversion for every tensor; what it refers to is shared, not copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class ExactRenaming(WeightRenaming):
    """Renames the keys of a table and no other."""

    __slots__ = ("table",)

    def __init__(self, table: dict[str, str]) -> None:
        self.table = table
        super().__init__(source_patterns="kbitq_exact", target_patterns="kbitq_exact")

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.table.get(source_key, source_key), None


class ExactConverter(WeightConverter):
    """Collects exactly the tensors of a table, key to (target, source pattern), whatever other conversions would match.

    Args:
        table: keys are names after all renamings.
        reverse: what undoes it when saving; None if its result is saved as it is.
        decodes: whether its result is an ordinary parameter.
    """

    __slots__ = ("decodes", "reverse", "table")

    def __init__(
        self,
        source_patterns: list[str],
        target_patterns: list[str],
        operations: list[ConversionOps],
        table: dict[str, tuple[str, str]],
        reverse: WeightTransform | None = None,
        *,
        decodes: bool,
    ) -> None:
        super().__init__(source_patterns, target_patterns, operations)
        self.table, self.reverse, self.decodes = table, reverse, decodes

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key not in self.table:
            return source_key, None
        self._was_used = True
        return self.table[source_key]

    def __deepcopy__(self, memo: Any) -> ExactConverter:
        sources, targets = list(self._original_source_patterns), list(self._original_target_patterns)
        made = ExactConverter(sources, targets, self.operations, self.table, self.reverse, decodes=self.decodes)
        made.scope_prefix, made.base_model_prefix = self.scope_prefix, self.base_model_prefix
        return made

    def reverse_transform(self) -> WeightTransform:
        if self.reverse is None:
            raise ValueError("a decoded tensor is saved as it is")
        return self.reverse


@dataclass(frozen=True)
class Coded:
    """What decoding asks of a packed tensor beside its parts: its codec, and its source's shape."""

    codec: str
    shape: tuple[int, ...]


class DecodeOnLoad(_Shared, ConversionOps):
    """Decodes packed tensors whose place in the model is an ordinary parameter, before any conversion of the model's.

    The input's keys are source patterns that end as the names of parts do (``_packed``, ...); for each stem the decoded
    tensors go on under the stem.

    Args:
        coded: what comes, by (target, stem).
    """

    hf_quantizer = True  # tells the loader to hand over the tensors as stored, without a cast

    def __init__(self, coded: Mapping[tuple[str, str], Coded]) -> None:
        self.coded: dict[str, dict[str, Coded]] = {}
        for (target, stem), of_stem in coded.items():
            self.coded.setdefault(target, {})[stem] = of_stem

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        full_layer_name, model = kwargs["full_layer_name"], kwargs["model"]
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        expected = self.coded[full_layer_name]
        stem_of = {next(iter(part_names(coded.codec, stem).values())): stem for stem, coded in expected.items()}
        result: dict[str, Any] = {}
        for stem in [stem_of[key] for key in input_dict if key in stem_of]:
            coded = expected[stem]
            names = part_names(coded.codec, stem)
            columns = [_as_list(input_dict.pop(name)) for name in names.values()]
            tensors = [dict(zip(names, parts, strict=True)) for parts in zip(*columns, strict=True)]
            result[stem] = [_decode(coded, parts, dtype) for parts in tensors]
        return result


class PlaceDecoded(_Shared, ConversionOps):
    """Gives a single decoded tensor the name and the shape of its parameter."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        full_layer_name, model = kwargs["full_layer_name"], kwargs["model"]
        (tensor,) = _as_list(next(iter(input_dict.values())))
        return {full_layer_name: tensor.reshape(model.get_parameter_or_buffer(full_layer_name).shape)}


class ConstantsByGroup(_Shared, ConversionOps):
    """Merged constants ``[E, groups * n, ...]`` as ``[E, groups, n, ...]``; ``join`` is the way back."""

    def __init__(self, groups: int, join: bool = False) -> None:
        self.groups, self.join = groups, join

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        ((key, value),) = input_dict.items()
        (tensor,) = _as_list(value)
        return {key: tensor.flatten(1, 2) if self.join else tensor.unflatten(1, (self.groups, -1))}

    @property
    def reverse_op(self) -> ConversionOps:
        return ConstantsByGroup(self.groups, not self.join)


def _as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _decode(coded: Coded, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    kinds = part_kinds(coded.codec)
    # A matrix name is enough here: the parts already are the matrix, or the stack of matrices, of their format.
    is_stack = any(held.dim() == 3 for part, held in parts.items() if not kinds[part])
    cols = coded.shape[-1] if is_stack else fmt.matrix_shape("", coded.shape)[1]
    target = dtype if dtype in ops.FLOAT_DTYPES else torch.float32
    matrices = {n: t if kinds[n] else t.reshape(-1, t.shape[-1]).contiguous() for n, t in parts.items()}
    return get_codec(coded.codec).decode(matrices, cols, target).to(dtype).reshape(coded.shape)
