"""What the quantized layers share: the parameters of a packed weight, and moves and casts that leave them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kbitq import format as fmt
from kbitq import ops
from kbitq.codecs import codebooks
from kbitq.codecs.base import Part, constant_dims, get_codec, part_kinds, part_name
from kbitq.nn.tiled import TiledModule
from kbitq.ops import tiled_linear
from kbitq.ops.dtypes import TORCH_DTYPES
from kbitq.quantized import QuantizedTensor, quantize


@dataclass(frozen=True)
class WeightInfo:
    """What a file says of a weight beside its bytes; carried along so that saving writes it again.

    Attributes:
        dtype: of the source tensor.
        scale: the rule that chose the scales.
        codebook: name of the levels.
        sqnr_db: measured when quantizing, in decibels.
        max_abs_err: largest error, measured when quantizing.
        importance: SHA-256 of the importance file, where one was used.
        codec: how the weight is coded.
        calibrated: fingerprint of the statistics that error feedback used, where it did.
    """

    dtype: torch.dtype = torch.float32
    scale: str = "mse"
    codebook: str = "optimal"
    sqnr_db: float | None = None
    max_abs_err: float | None = None
    importance: str | None = None
    codec: str = fmt.DEFAULT_CODEC
    calibrated: str | None = None

    @classmethod
    def described(cls, meta: fmt.TensorMeta) -> WeightInfo:
        """What a file's description says."""
        dtype = TORCH_DTYPES.get(meta.dtype, torch.float32)
        made_with = meta.importance, meta.codec, meta.calibrated
        return cls(dtype, meta.scale, meta.codebook, meta.sqnr_db, meta.max_abs_err, *made_with)

    @classmethod
    def of(cls, q: QuantizedTensor) -> WeightInfo:
        """What a freshly quantized tensor knows of itself."""
        return cls(q.dtype, q.scale, q.codebook_name, q.sqnr_db, q.max_abs_err, codec=q.codec)


def packed_parameters(
    name: str, shape: tuple[int, ...], k: int, device: Any = None, codec: str = fmt.DEFAULT_CODEC
) -> dict[str, nn.Parameter]:
    """Uninitialised parameters for a weight, one for each part: ``name_packed`` and so on (no gradient).

    Parameters and not buffers, because loaders merge and shard parameters only.
    """
    full = name if len(shape) == 2 else f"experts.{name}"

    def parameter(part: Part) -> nn.Parameter:
        return frozen(torch.empty(part.shape, dtype=TORCH_DTYPES[part.dtype], device=device))

    return {part_name(name, part): parameter(part) for part in get_codec(codec).parts(full, shape, k)}


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradient around a tensor."""
    return nn.Parameter(tensor, requires_grad=False)


def group_count(codec: str, parts: Mapping[str, Tensor]) -> int:
    """Into how many equal groups of rows the constants among the parts of a matrix cut it; 1 as a rule."""
    dims = constant_dims(codec)
    return max((held.shape[0] for part, held in parts.items() if held.dim() > dims.get(part, held.dim())), default=1)


def by_group(codec: str, parts: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The parts of a matrix cut into its groups of rows: each has constants of its own, as codecs decode them."""
    groups, dims = group_count(codec, parts), constant_dims(codec)
    cut: dict[str, Any] = {}
    for part, held in parts.items():
        if part not in dims:
            cut[part] = held.chunk(groups)
        else:
            cut[part] = held if held.dim() > dims[part] else [held] * groups
    return [{part: pieces[i] for part, pieces in cut.items()} for i in range(groups)]


class PackedModule(TiledModule):
    """A module some of whose parameters are packed weights: whatever casts the module, those keep their dtypes.

    ``dtype`` is the floating type that a dense weight in their place would have; it follows ``.to(dtype)``.
    """

    dtype: torch.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        here = self._where()
        sample = fn(torch.empty(0, dtype=self.dtype, device=here))
        if sample.device != here:
            self.untile()
        whole = {id(parameter) for parameter in self.holders()}

        def careful(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in whole and result.dtype != tensor.dtype:
                return tensor.to(result.device)
            return result

        self.dtype = sample.dtype
        return super()._apply(careful, recurse)

    def _where(self) -> torch.device:
        return next((p.device for p in self.holders() if p is not None), torch.device("cpu"))


class PackedMatrix(PackedModule):
    """One packed matrix ``weight [rows, cols]``: the common part of the linear and the embedding layer."""

    def __init__(
        self, rows: int, cols: int, k: int, *, device: Any, dtype: torch.dtype | None, codec: str = fmt.DEFAULT_CODEC
    ) -> None:
        super().__init__()
        self.shape, self.k = (rows, cols), k
        self.dtype = dtype or torch.get_default_dtype()
        self.info = WeightInfo(dtype=self.dtype, codec=codec)
        for name, parameter in packed_parameters("weight", self.shape, k, device, codec).items():
            self.register_parameter(name, parameter)

    def packed_names(self) -> Iterable[str]:
        return ("weight",)

    def codec_of(self, name: str) -> str:
        return self.info.codec

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.shape

    @property
    def device(self) -> torch.device:
        """Where the weight lies."""
        return self._where()

    @property
    def parts(self) -> dict[str, nn.Parameter]:
        """The parameters that stand for the weight, by part: ``packed`` for ``weight_packed``."""
        return self.parts_of("weight")

    @property
    def groups(self) -> int:
        """Into how many equal groups of rows the constants cut the weight (fused projections); 1 as a rule."""
        return group_count(self.info.codec, self.constants_of("weight"))

    @property
    def weight(self) -> Tensor:
        """The decoded weight, made anew at each access; writing into it changes nothing."""
        return self.dequantize()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight ``[rows, cols]``, decoded in float32 and rounded once to ``dtype`` (the module's by default)."""
        cols, target = self.shape[1], dtype or self.dtype
        if target not in ops.FLOAT_DTYPES:  # float64: the decode rule is float32, so widening it loses nothing
            return self.dequantize(torch.float32).to(target)
        if (tiles := self.tiles_of("weight")) is not None:
            return tiled_linear.dequantize(tiles, target)
        codec = get_codec(self.info.codec)
        decoded = [codec.decode(parts, cols, target) for parts in self.by_group()]
        return decoded[0] if len(decoded) == 1 else torch.cat(decoded)

    def by_group(self) -> list[dict[str, Tensor]]:
        """The parts of each group of rows that shares its constants."""
        return by_group(self.info.codec, self.parts)

    def set_quantized(self, q: QuantizedTensor) -> None:
        """Take over a quantized matrix of this layer's shape."""
        if tuple(q.shape) != self.shape:
            raise ValueError(f"q: has shape {list(q.shape)}, needs {list(self.shape)}")
        for part, tensor in q.parts.items():
            setattr(self, part_name("weight", part), frozen(tensor))
        self.info, self.k = WeightInfo.of(q), q.k

    def requantize(self, weight: Tensor, k: int | None = None) -> None:
        """Hold another weight ``[rows, cols]``: quantized with this layer's K, scale rule and codebook.

        A codebook known by name is used again; of any other, the present levels. One for each group of rows stays so.
        With another ``k`` the levels are ``optimal`` unless they have a name. Raises NonFiniteError.
        """
        info, bits, groups = self.info, k or self.k, self.by_group()
        scale = info.scale if info.scale in fmt.SCALE_RULES else WeightInfo.scale
        made = []
        for rows, parts in zip(weight.chunk(len(groups)), groups, strict=True):
            levels: Any = info.codebook
            if info.codebook not in codebooks.BUILTIN:
                levels = get_codec(info.codec).levels_of(parts) if bits == self.k else WeightInfo.codebook
            made.append(quantize(rows, bits, scale=scale, codebook=levels, codec=info.codec))
        for part, constant in part_kinds(info.codec).items():
            pieces = [q.parts[part] for q in made]
            stacked = torch.stack(pieces) if constant and len(groups) > 1 else torch.cat(pieces)
            setattr(self, part_name("weight", part), frozen(pieces[0] if len(groups) == 1 else stacked))
        measured = (made[0].sqnr_db, made[0].max_abs_err) if len(made) == 1 else (None, None)
        self.k = bits
        self.info = WeightInfo(info.dtype, scale, made[0].codebook_name, *measured, codec=info.codec)

    def quantized(self) -> QuantizedTensor:
        """The weight as a ``QuantizedTensor`` that shares this layer's memory. One codebook only."""
        info, parts = self.info, {name: part.data for name, part in self.parts.items()}
        return QuantizedTensor(
            parts, self.shape, info.dtype, self.k, info.scale, info.codebook, info.sqnr_db, info.max_abs_err, info.codec
        )
