"""Weight conversions for transformers' loader: exact routes for packed tensors, decoding on load, splitting on save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

from kbitq import format as fmt
from kbitq import ops

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


class DecodeOnLoad(_Shared, ConversionOps):
    """Decodes packed tensors whose place in the model is an ordinary parameter, before any conversion of the model's.

    The input's keys are source patterns that end like ``_packed``, ``_absmax`` and ``_codebook``; for each stem the
    decoded tensors go on under the stem.

    Args:
        shapes: source shape by (target, stem).
    """

    hf_quantizer = True  # tells the loader to hand over the tensors as stored, without a cast

    def __init__(self, shapes: dict[tuple[str, str], tuple[int, ...]]) -> None:
        self.shapes = shapes

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        full_layer_name, model = kwargs["full_layer_name"], kwargs["model"]
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        stems = [p.removesuffix(fmt.PACKED_SUFFIX) for p in input_dict if p.endswith(fmt.PACKED_SUFFIX)]
        result: dict[str, Any] = {}
        for stem in stems:
            parts = [_as_list(input_dict.pop(part)) for part in fmt.companion_names(stem)]
            shape = self.shapes[full_layer_name, stem]
            result[stem] = [_decode(p, a, c, shape, dtype) for p, a, c in zip(*parts, strict=True)]
        return result


class PlaceDecoded(_Shared, ConversionOps):
    """Gives a single decoded tensor the name and the shape of its parameter."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        full_layer_name, model = kwargs["full_layer_name"], kwargs["model"]
        (tensor,) = _as_list(next(iter(input_dict.values())))
        return {full_layer_name: tensor.reshape(model.get_parameter_or_buffer(full_layer_name).shape)}


class CodebookParts(_Shared, ConversionOps):
    """Merged codebooks ``[E, parts * 2^K]`` as ``[E, parts, 2^K]``; ``join`` is the way back."""

    def __init__(self, parts: int, join: bool = False) -> None:
        self.parts, self.join = parts, join

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        ((key, value),) = input_dict.items()
        (tensor,) = _as_list(value)
        shape = (tensor.shape[0], -1) if self.join else (tensor.shape[0], self.parts, -1)
        return {key: tensor.reshape(shape)}

    @property
    def reverse_op(self) -> ConversionOps:
        return CodebookParts(self.parts, not self.join)


def _as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _decode(packed: Tensor, absmax: Tensor, codebook: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    # A matrix name is enough here: the three parts already are the matrix, or the stack of matrices, of their format.
    cols = shape[-1] if packed.dim() == 3 else fmt.matrix_shape("", shape)[1]
    rows = packed.numel() // packed.shape[-1]
    target = dtype if dtype in ops.FLOAT_DTYPES else torch.float32
    decoded = ops.dequantize(
        packed.reshape(rows, -1).contiguous(), absmax.reshape(rows, -1).contiguous(), codebook, cols, target
    )
    return decoded.to(dtype).reshape(tuple(shape))
