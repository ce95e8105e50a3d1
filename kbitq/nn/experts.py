"""Fused mixture-of-experts weights, kept packed under the code that a model already has for its experts.

An experts module holds stacks ``[E, a, b]`` (``gate_up_proj``, ``down_proj``), and its own forward indexes them by
expert. :func:`pack_experts` replaces a stack by the parts that its codec names (``gate_up_proj_packed``, ...) and
leaves the forward as it is: there ``self.gate_up_proj`` becomes an :class:`ExpertStack`, whose items multiply by one
expert's packed matrix. On a GPU, experts of the usual form take all tokens through all experts at once instead
(:func:`_grouped`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kbitq.codecs.base import constant_dims, get_codec, part_name
from kbitq.format import DEFAULT_CODEC
from kbitq.nn.packed import PackedModule, WeightInfo, by_group, frozen, packed_parameters
from kbitq.ops import tiled_linear
from kbitq.ops.linear import autocast
from kbitq.ops.tiles import Tiles
from kbitq.quantized import QuantizedTensor


class _Decoded:
    """Stands for a dense tensor: any torch function on it works on the decoded values, except those done better."""

    _is_hf_initialized = True  # transformers' initialisers leave such a "tensor" alone

    def dense(self) -> Tensor:
        """The decoded values; each of the two kinds below has its own."""
        raise NotImplementedError  # abstract: a matrix, or a stack

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        decoded = [a.dense() if isinstance(a, _Decoded) else a for a in args]
        named = {n: a.dense() if isinstance(a, _Decoded) else a for n, a in (kwargs or {}).items()}
        return func(*decoded, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)


class ExpertMatrix(_Decoded):
    """One expert's matrix ``[a, b]``; ``torch.nn.functional.linear(x, matrix)`` multiplies by the packed weight."""

    def __init__(self, codec: str, weight: Mapping[str, Tensor] | Tiles, cols: int, dtype: torch.dtype) -> None:
        if isinstance(weight, Tiles):
            rows, self.device = weight.rows, weight.data.device
        else:
            first = next(iter(weight.values()))
            rows, self.device = first.shape[0], first.device
        self.codec, self.weight, self.shape, self.dtype = codec, weight, torch.Size((rows, cols)), dtype

    def dense(self) -> Tensor:
        if isinstance(self.weight, Tiles):
            return tiled_linear.dequantize(self.weight, self.dtype)
        codec, groups = get_codec(self.codec), by_group(self.codec, self.weight)
        return torch.cat([codec.decode(parts, self.shape[1], self.dtype) for parts in groups])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear and isinstance(args[1], cls):
            return cls._linear(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @staticmethod
    def _linear(x: Tensor, weight: ExpertMatrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight.weight, Tiles):
            x = autocast(x)
            return tiled_linear.linear(x, weight.weight, bias if bias is None else bias.to(x.dtype))
        if not x.is_cuda:
            return get_codec(weight.codec).linear(x, weight.weight, bias)
        x = autocast(x)
        # Not the codec's `linear`: it would make tiles for this one matrix, which is a new view each time.
        return nn.functional.linear(x, weight.dense().to(x.dtype), bias)


class ExpertStack(_Decoded):
    """A packed stack ``[E, a, b]``. Indexed by one expert it gives an :class:`ExpertMatrix`; otherwise it is decoded.

    Args:
        codec: how it is coded.
        weight: its tiles; or the parts by name, as the codec gives them for a stack, constants also as ``[E, G, ...]``:
            one for each of G equal groups of an expert's rows.
        shape: ``[E, a, b]``.
        dtype: that a dense stack in its place would have.
    """

    def __init__(
        self, codec: str, weight: Mapping[str, Tensor] | Tiles, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.codec, self.weight, self.shape, self.dtype = codec, weight, torch.Size(shape), dtype
        self.device = (weight.data if isinstance(weight, Tiles) else next(iter(weight.values()))).device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, Tensor) and index.dim() == 0 and index.dtype != torch.bool:
            index = int(index)
        if not isinstance(index, int):
            return self.dense()[index]
        count, rows, cols = self.shape
        if not -count <= index < count:
            raise IndexError(f"expert {index} of {count}")
        if isinstance(self.weight, Tiles):
            begin = index % count * rows
            return ExpertMatrix(self.codec, self.weight.rows_of(begin, begin + rows), cols, self.dtype)
        dims = constant_dims(self.codec)
        parts = {n: held if held.dim() == dims.get(n) else held[index] for n, held in self.weight.items()}
        return ExpertMatrix(self.codec, parts, cols, self.dtype)

    def dense(self) -> Tensor:
        return torch.stack([self[i].dense() for i in range(len(self))])


class StackSize(NamedTuple):
    """What the parts of a packed stack do not tell."""

    k: int
    cols: int


class KbitExperts(PackedModule):
    """Mixed into a model's own experts class by :func:`pack_experts`; not made directly."""

    _dense_class: type[nn.Module]
    _stacks: dict[str, StackSize]
    info: dict[str, WeightInfo]

    def stack(self, name: str) -> ExpertStack:
        """The packed stack ``name``."""
        tiles = self.tiles_of(name)
        weight = self.parts_of(name) if tiles is None else tiles
        return ExpertStack(self.codec_of(name), weight, self.shape_of(name), self.dtype)

    def shape_of(self, name: str) -> tuple[int, ...]:
        if name in self._tiled:
            return self._tiled[name]
        first = next(iter(self.parts_of(name).values()))  # no constant: those come last
        return (*first.shape[:2], self._stacks[name].cols)

    def k_of(self, name: str) -> int:
        """Bits of an index of the stack ``name``."""
        return self._stacks[name].k

    def is_whole(self, name: str) -> bool:
        """Whether the stack ``name`` has one constant of each kind, not one for each expert: files have it whole."""
        dims = constant_dims(self.codec_of(name))
        return all(held.dim() == dims[part] for part, held in self.constants_of(name).items())

    def packed_names(self) -> Iterable[str]:
        return tuple(self._stacks)

    def codec_of(self, name: str) -> str:
        return self.info[name].codec

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_stacks", ()):
            return self.stack(name)
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One launch for all experts where that can be; else the model's own loop, one matrix at a time."""
        if args and isinstance(args[0], Tensor):
            for name in self._stacks:
                self.tile_weight(name, args[0])
        if len(args) == 3 and not kwargs and (stacks := self._grouped_stacks(args[0], args[1])):
            return _grouped(self, *args, *stacks)
        dense = self._dense_class.forward
        return getattr(dense, "__wrapped__", dense)(self, *args, **kwargs)

    def _grouped_stacks(self, x: Tensor, chosen: Tensor) -> tuple[Tiles, Tiles] | None:
        """Tiles of both stacks, where the module is of the form that transformers' own grouped implementations know
        (x, up or gate and up, activation, down) and a grouped product is the quicker way."""
        gate = getattr(self, "has_gate", None)
        first = "gate_up_proj" if gate else "up_proj"
        odd = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")  # older versions lack two
        if (
            gate is None
            or self._stacks.keys() != {first, "down_proj"}
            or any(getattr(self, name, False) for name in odd)
        ):
            return None
        if not x.is_cuda or x.dtype not in tiled_linear.GROUPED_DTYPES or (torch.is_grad_enabled() and x.requires_grad):
            return None
        if not tiled_linear.takes_groups(x.get_device()):
            return None
        count = self.shape_of(first)[0]
        if getattr(self, "num_experts", None) != count or chosen.numel() > count * tiled_linear.FUSED_ROWS:
            return None
        tiles = [self._tiles_for_groups(name) for name in (first, "down_proj")]
        return (tiles[0], tiles[1]) if tiles[0] is not None and tiles[1] is not None else None

    def _tiles_for_groups(self, name: str) -> Tiles | None:
        """What the stack is held by, or, where it cannot be held so (kbitq.nn.tiled), tiles beside its parts."""
        held = self.tiles_of(name)
        return held if held is not None else self._make_tiles(name, self.parts_of(name))

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self._dense_class,), self.__getstate__()

    def unpack(self, dtype: torch.dtype | None = None) -> None:
        """Become the dense module again, with decoded stacks."""
        self.untile()
        for name in self.packed_names():
            dense = self.stack(name).dense().to(dtype or self.dtype)
            for part in self.parts_of(name):
                delattr(self, part_name(name, part))
            del self._stacks[name], self.info[name]
            self.register_parameter(name, nn.Parameter(dense))
        self.__class__ = self._dense_class  # type: ignore[assignment]

    def extra_repr(self) -> str:
        stacks = {name: self.stack(name) for name in self._stacks}
        ks = sorted({self.k_of(name) for name in self._stacks})
        return ", ".join([*(f"{n}={list(s.shape)}" for n, s in stacks.items()), f"k={'/'.join(map(str, ks))}"])


def _grouped(module: Any, x: Tensor, chosen: Tensor, weights: Tensor, first: Tiles, second: Tiles) -> Tensor:
    """All tokens through the experts chosen for them; nothing of it waits for the GPU, so graphs may capture it.

    Args:
        module: has ``num_experts`` and ``_apply_gate`` or ``act_fn``.
        x: ``[tokens, b]``.
        chosen: experts of each token, ``[tokens, top_k]``.
        weights: of their outputs, ``[tokens, top_k]``.
        first: tiles of the stack ``[E, a, b]``.
        second: tiles of the stack ``[E, b, a or a / 2]``.
    """
    experts, top_k = module.num_experts, chosen.shape[-1]
    by_expert, order = torch.sort(chosen.reshape(-1), stable=True)
    ends = torch.arange(experts + 1, device=x.device, dtype=by_expert.dtype)
    offsets = torch.searchsorted(by_expert, ends, out_int32=True)
    hidden = tiled_linear.grouped_linear(x[order // top_k], first, offsets)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    out = tiled_linear.grouped_linear(hidden, second, offsets)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=x.device)
    out = out[back].view(*chosen.shape, -1) * weights[..., None]
    return out.sum(dim=-2).to(x.dtype)


_packed_classes: dict[type, type[KbitExperts]] = {}


def _packed_class(dense: type[nn.Module]) -> type[KbitExperts]:
    if dense not in _packed_classes:
        members = {"_dense_class": dense, "__module__": __name__}
        _packed_classes[dense] = type(f"Kbit{dense.__name__}", (KbitExperts, dense), members)
    return _packed_classes[dense]


def _blank(dense: type[nn.Module]) -> KbitExperts:
    made = _packed_class(dense)
    return made.__new__(made)


def pack_experts(module: nn.Module, stacks: Mapping[str, tuple[int, int]], codec: str = DEFAULT_CODEC) -> KbitExperts:
    """Replace dense stacks of an experts module, in place, by uninitialised packed ones.

    Args:
        module: holds a parameter ``[E, a, b]`` for every name in ``stacks``.
        stacks: by name, K and the number of codebooks an expert has (0: one codebook for the whole stack).
        codec: how the stacks are coded.
    """
    dense = {name: module.get_parameter(name) for name in stacks}
    made = cast(KbitExperts, module)
    if not isinstance(module, KbitExperts):
        module.__class__ = _packed_class(type(module))
        made._stacks, made.info = {}, {}
        made.dtype = next(iter(dense.values())).dtype
    for name, (k, parts) in stacks.items():
        shape, dtype = tuple(dense[name].shape), dense[name].dtype
        delattr(made, name)
        parameters = packed_parameters(name, shape, k, dense[name].device, codec)
        for part in constant_dims(codec) if parts else ():
            one = parameters[part_name(name, part)]
            parameters[part_name(name, part)] = frozen(one.new_empty((shape[0], parts, *one.shape)))
        for part, parameter in parameters.items():
            made.register_parameter(part, parameter)
        made._stacks[name] = StackSize(k, shape[2])
        made.info[name] = WeightInfo(dtype=dtype, codec=codec)
    return made


def quantize_experts(module: nn.Module, quantized: Mapping[str, QuantizedTensor]) -> KbitExperts:
    """:func:`pack_experts` with the values of quantized stacks (one codebook a stack)."""
    made = cast(KbitExperts, module)
    for name, q in quantized.items():
        made = pack_experts(module, {name: (q.k, 0)}, q.codec)
        for part, tensor in q.parts.items():
            setattr(made, part_name(name, part), frozen(tensor))
        made.info[name] = WeightInfo.of(q)
    return made
