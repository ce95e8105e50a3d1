"""A linear layer of a server: what loads its weight, cut for this device, and what multiplies by it.

The two classes are mixed into a server's own base classes, whose names and arguments these are (vLLM's, and SGLang's
after it). A layer that is fused from several has one matrix for each, and these may differ in codec and K, or be kept.
Its parameters are empty until a tensor arrives: only then are codec and K known, whatever the server calls the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kbitq.codecs.base import get_codec, part_name
from kbitq.integrations.serving import products
from kbitq.integrations.serving.matrix import Arriving, fixed, waiting
from kbitq.integrations.serving.names import StoredNames
from kbitq.ops.dtypes import TORCH_DTYPES

_SHARDS = {"q": 0, "k": 1, "v": 2}


class PartLoading:
    """How a parameter takes what arrives of one part; for a server's parameter class. Sizes are in rows."""

    output_dim = 0
    part: str | None
    constant: bool
    arriving: Sequence[Arriving]
    tp_rank: int

    def _take(self, shard: Any, tensor: Tensor, rank: int, rows: bool = True) -> None:
        mine = self.arriving[_SHARDS.get(shard, shard)]
        if rows and not self.constant and tensor.shape[0] != mine.rows:
            tensor = tensor.narrow(0, rank * mine.rows, mine.rows)
        mine.take(self.part, tensor, self.device)  # type: ignore[attr-defined]

    def _rank(self, given: int | None) -> int:
        return self.tp_rank if given is None else given

    def load_column_parallel_weight(self, loaded_weight: Tensor, tp_rank: int | None = None, **_: Any) -> None:
        """A layer of one matrix, cut along its outputs."""
        self._take(0, loaded_weight, self._rank(tp_rank))

    def load_row_parallel_weight(self, loaded_weight: Tensor, tp_rank: int | None = None, **_: Any) -> None:
        """A layer of one matrix, cut along its inputs once all parts are there."""
        (mine,) = self.arriving
        mine.cut(self._rank(tp_rank), mine.share[1])
        self._take(0, loaded_weight, 0, rows=False)

    def load_merged_column_weight(
        self, loaded_weight: Tensor, shard_id: Any = 0, tp_rank: int | None = None, **_: Any
    ) -> None:
        """One of the matrices of a fused layer."""
        self._take(shard_id, loaded_weight, self._rank(tp_rank))

    def load_qkv_weight(
        self, loaded_weight: Tensor, shard_id: Any = 0, num_heads: int = 1, tp_rank: int | None = None, **_: Any
    ) -> None:
        """One of q, k and v; ``num_heads`` devices have the same k and v."""
        rank = self._rank(tp_rank)
        self._take(shard_id, loaded_weight, rank if shard_id in ("q", 0) else rank // num_heads)


class PackedLinear:
    """A server's linear method for layers of a folder that kbitq wrote.

    Args:
        stored: what the folder has.
        prefix: the layer's name, for messages.
        dummy: the modules that it is made of, where weights are to be made up and not loaded.
    """

    parameter_class: type[Any]
    constant_class: type[Any]
    loader_name = "weight_loader_v2"  # of a layer whose loader calls the methods of :class:`PartLoading`

    def __init__(self, stored: StoredNames, prefix: str, dummy: Sequence[str] = ()) -> None:
        self.stored, self.prefix, self.dummy = stored, prefix, dummy

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer empty parameters that take what the files have of it.

        Args:
            layer: it.
            input_size_per_partition: columns of this device.
            output_partition_sizes: rows of this device, of each matrix that the layer is fused from.
            input_size: columns of the whole weight.
            output_size: rows of the whole weight.
            params_dtype: of ordinary weights.
            extra_weight_attrs: ``weight_loader``, and attributes of the server's own.
        """
        loader = extra_weight_attrs.pop("weight_loader")
        arriving = [Arriving(self.prefix, rows, input_size, self.stored.codecs) for rows in output_partition_sizes]
        for mine in arriving:
            mine.cut(0, input_size_per_partition)
        layer.kbitq_arriving, layer.kbitq_dtype = arriving, params_dtype  # type: ignore[assignment]
        for part, constant in self.stored.arriving():
            made = self._parameter(part, constant, arriving, loader, params_dtype)
            for name, value in extra_weight_attrs.items():
                setattr(made, name, value)
            layer.register_parameter(arriving_name(part), made)

    def _parameter(
        self, part: str | None, constant: bool, arriving: list[Arriving], loader: Any, dtype: torch.dtype
    ) -> Any:
        kind = self.constant_class if constant else self.parameter_class
        # A row a matrix: for a tensor that is fused in the file, servers give a constant to each row of the parameter.
        shape = (len(arriving), 0) if constant else (0,)
        data = waiting(shape, dtype if part is None else part_dtype(self.stored, part))
        made = kind(data=data, weight_loader=None)
        by_layer = getattr(loader, "__name__", "") == self.loader_name
        made.weight_loader = _unless_empty(loader if by_layer else _replicated)
        made.part, made.constant, made.arriving = part, constant, arriving
        return made

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace what has arrived by what :func:`products.multiply` needs; on a GPU that is the tile order alone.

        Raises:
            FormatError: parts are missing or do not fit.
            ValueError: the weight cannot be cut for this device.
        """
        if hasattr(layer, "kbitq_pieces"):
            return
        if self.dummy:
            self._make_up(layer)
        arrived = [mine.finished(layer.kbitq_dtype) for mine in layer.kbitq_arriving]
        forget(layer, self.stored)
        products.place(layer, arrived)

    def _make_up(self, layer: Any) -> None:
        arriving: Sequence[Arriving] = layer.kbitq_arriving
        modules = self.dummy if len(self.dummy) == len(arriving) else [self.prefix] * len(arriving)
        device = layer._parameters[arriving_name(None)].device
        for mine, coding in zip(arriving, self.stored.codings_of(modules), strict=True):
            mine.make_up(coding, layer.kbitq_dtype, device)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T (+ bias)``."""
        return products.multiply(layer, x, bias)

    def dequantize_weight(self, layer: Any) -> Tensor:
        """The weight ``[rows, cols]``, for servers that quantize anew."""
        return products.decode(layer, layer.kbitq_dtype)


def arriving_name(part: str | None, stem: str = "weight") -> str:
    """The parameter that takes a part, or an ordinary weight."""
    return stem if part is None else part_name(stem, part)


def part_dtype(stored: StoredNames, part: str) -> torch.dtype:
    """The dtype of a part in the folder's files, so that servers do not warn of another one."""
    for name in stored.codecs:
        codec = get_codec(name)
        for known in codec.parts("", (1, codec.cut), codec.ks[0]):
            if known.name == part:
                return TORCH_DTYPES[known.dtype]
    raise KeyError(part)


def forget(layer: Any, stored: StoredNames, stem: str = "weight") -> None:
    """Delete the parameters that took what arrived. One of the parts stays, empty: by it LoRA finds the device."""
    parts = stored.part_names()
    device = layer._parameters[arriving_name(None, stem)].device
    for part in (None, *parts):
        delattr(layer, arriving_name(part, stem))
    layer.register_parameter(arriving_name(next(iter(parts)), stem), fixed(torch.empty(0, device=device)))
    del layer.kbitq_arriving


def _unless_empty(loader: Callable[..., Any]) -> Callable[..., Any]:
    """The loader, but the guard, an empty tensor under a weight's name, is let go."""

    def load(param: Any, loaded_weight: Tensor, *shard: Any, **named: Any) -> Any:
        return loader(param, loaded_weight, *shard, **named) if loaded_weight.numel() else None

    return load


def _replicated(param: Any, loaded_weight: Tensor, shard: Any = None) -> None:
    """Every device has the whole layer: what comes fused is cut by rows, a constant is for each of the matrices."""
    if shard is not None or len(param.arriving) == 1:
        param._take(shard or 0, loaded_weight, 0)
        return
    begin = 0
    for index, mine in enumerate(param.arriving):
        own = loaded_weight if param.constant else loaded_weight.narrow(0, begin, mine.rows)
        param._take(index, own, 0)
        begin += mine.rows
