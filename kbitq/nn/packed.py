"""What the quantized layers share: the parameters of a packed weight, and moves and casts that leave them whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kbitq import format as fmt
from kbitq import ops
from kbitq.codecs import codebooks
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
    """

    dtype: torch.dtype = torch.float32
    scale: str = "mse"
    codebook: str = "optimal"
    sqnr_db: float | None = None
    max_abs_err: float | None = None
    importance: str | None = None

    @classmethod
    def of(cls, q: QuantizedTensor) -> WeightInfo:
        """What a freshly quantized tensor knows of itself."""
        return cls(q.dtype, q.scale, q.codebook_name, q.sqnr_db, q.max_abs_err)


def packed_parameters(name: str, shape: tuple[int, ...], k: int, device: Any = None) -> dict[str, nn.Parameter]:
    """Uninitialised parameters for a weight: ``name_packed``, ``name_absmax``, ``name_codebook`` (no gradient).

    Parameters and not buffers, because loaders merge and shard parameters only.
    """
    full = name if len(shape) == 2 else f"experts.{name}"
    dtypes = (torch.int32, torch.uint8, torch.float32)
    shapes = (fmt.packed_shape(full, shape, k), fmt.absmax_shape(full, shape), (1 << k,))
    return {
        part: nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        for part, size, dtype in zip(fmt.companion_names(name), shapes, dtypes, strict=True)
    }


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradient around a tensor."""
    return nn.Parameter(tensor, requires_grad=False)


class PackedModule(nn.Module):
    """A module some of whose parameters are packed weights: whatever casts the module, those keep their dtypes.

    ``dtype`` is the floating type that a dense weight in their place would have; it follows ``.to(dtype)``.
    """

    dtype: torch.dtype

    def packed_names(self) -> list[str]:
        """Names of the weights held packed: ``weight`` stands for ``weight_packed`` and its companions."""
        return [n.removesuffix(fmt.PACKED_SUFFIX) for n in self._parameters if n.endswith(fmt.PACKED_SUFFIX)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        parts = [self._parameters[part] for name in self.packed_names() for part in fmt.companion_names(name)]
        whole = {id(part) for part in parts}

        def careful(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in whole and result.dtype != tensor.dtype:
                return tensor.to(result.device)
            return result

        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=_real_device(parts))).dtype
        return super()._apply(careful, recurse)


def _real_device(parts: list[nn.Parameter | None]) -> torch.device:
    return next((p.device for p in parts if p is not None), torch.device("cpu"))


class PackedMatrix(PackedModule):
    """One packed matrix ``weight [rows, cols]``: the common part of the linear and the embedding layer."""

    weight_packed: nn.Parameter
    weight_absmax: nn.Parameter
    weight_codebook: nn.Parameter

    def __init__(self, rows: int, cols: int, k: int, *, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.shape = (rows, cols)
        self.dtype = dtype or torch.get_default_dtype()
        self.info = WeightInfo(dtype=self.dtype)
        for name, parameter in packed_parameters("weight", self.shape, k, device).items():
            self.register_parameter(name, parameter)

    @property
    def k(self) -> int:
        """Bits of an index."""
        return self.weight_codebook.shape[-1].bit_length() - 1

    @property
    def weight(self) -> Tensor:
        """The decoded weight, made anew at each access; writing into it changes nothing."""
        return self.dequantize()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight ``[rows, cols]``, decoded in float32 and rounded once to ``dtype`` (the module's by default)."""
        cols, target = self.shape[1], dtype or self.dtype
        if target not in ops.FLOAT_DTYPES:  # float64: the decode rule is float32, so widening it loses nothing
            return self.dequantize(torch.float32).to(target)
        books = self.weight_codebook.reshape(-1, self.weight_codebook.shape[-1])
        chunks = zip(self.weight_packed.chunk(len(books)), self.weight_absmax.chunk(len(books)), books, strict=True)
        parts = [ops.dequantize(packed, absmax, levels, cols, target) for packed, absmax, levels in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def set_quantized(self, q: QuantizedTensor) -> None:
        """Take over a quantized matrix of this layer's shape."""
        if tuple(q.shape) != self.shape:
            raise ValueError(f"q: has shape {list(q.shape)}, needs {list(self.shape)}")
        for part, tensor in zip(fmt.companion_names("weight"), (q.packed, q.absmax, q.codebook), strict=True):
            setattr(self, part, frozen(tensor))
        self.info = WeightInfo.of(q)

    def requantize(self, weight: Tensor) -> None:
        """Hold another weight ``[rows, cols]``: quantized with this layer's K, scale rule and codebook.

        A codebook known by name is used again; of any other, the present levels. One for each group of rows stays so.
        Raises NonFiniteError.
        """
        info, parts = self.info, []
        books = self.weight_codebook.reshape(-1, self.weight_codebook.shape[-1])
        scale = info.scale if info.scale in fmt.SCALE_RULES else WeightInfo.scale
        for part, book in zip(weight.chunk(len(books)), books, strict=True):
            levels = info.codebook if info.codebook in codebooks.BUILTIN else book
            parts.append(quantize(part, self.k, scale=scale, codebook=levels))
        self.weight_packed = frozen(torch.cat([q.packed for q in parts]))
        self.weight_absmax = frozen(torch.cat([q.absmax for q in parts]))
        stacked = torch.stack([q.codebook for q in parts])
        self.weight_codebook = frozen(stacked if self.weight_codebook.dim() == 2 else stacked[0])
        one = len(parts) == 1
        self.info = WeightInfo(
            info.dtype, scale, parts[0].codebook_name,
            parts[0].sqnr_db if one else None, parts[0].max_abs_err if one else None,
        )  # fmt: skip

    def quantized(self) -> QuantizedTensor:
        """The weight as a ``QuantizedTensor`` that shares this layer's memory. One codebook only."""
        info = self.info
        return QuantizedTensor(
            self.weight_packed.data, self.weight_absmax.data, self.weight_codebook.data, self.shape,
            info.dtype, info.scale, info.codebook, info.sqnr_db, info.max_abs_err,
        )  # fmt: skip
