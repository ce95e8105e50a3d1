"""One quantized tensor in memory, and the two functions that make it and turn it back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kbitq import format as fmt
from kbitq import ops
from kbitq.codecs import feedback, fit
from kbitq.codecs.base import Codec, Request, bits_per_weight, get_codec, part_kinds
from kbitq.codecs.planes import Planes
from kbitq.errors import NonFiniteError

if TYPE_CHECKING:
    import os


@dataclass(repr=False)
class QuantizedTensor:
    """The parts that replace a tensor (docs/format.md section 2), and what is known of its source.

    ``torch.save`` and ``pickle`` keep it; ``torch.load(..., weights_only=True)`` takes it once this class is imported.

    Attributes:
        parts: by name. Of the codec ``planes``: ``packed`` int32 ``[rows, nblk * K]`` (``[E, a, nblk * K]`` for fused
            experts), ``absmax`` uint8 ``[rows, nblk]`` (``[E, a, nblk]``), ``codebook`` float32 ``[2^K]``, ascending.
            Of ``trellis`` a codebook of ``[2^(K + 2)]``, and of ``trellis/128`` a scale for four blocks. Each is an
            attribute too: ``q.packed``.
        shape: of the source tensor.
        dtype: of the source tensor.
        k: bits of an index.
        scale: the rule that chose the scales, ``"absmax"`` or ``"mse"``.
        codebook_name: ``"optimal"``, ``"nf"``, ``"custom"``, ...
        sqnr_db: signal to quantization noise in decibels, if measured.
        max_abs_err: largest |w - w'|, if measured.
        codec: how the weights are coded.
    """

    parts: dict[str, Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    k: int
    scale: str = "mse"
    codebook_name: str = "optimal"
    sqnr_db: float | None = None
    max_abs_err: float | None = None
    codec: str = fmt.DEFAULT_CODEC

    def __getattr__(self, name: str) -> Tensor:
        parts: dict[str, Tensor] = self.__dict__.get("parts", {})
        if name in parts:
            return parts[name]
        raise AttributeError(f"QuantizedTensor has no attribute {name!r}")

    def __repr__(self) -> str:
        sqnr = "" if self.sqnr_db is None else f", {self.sqnr_db:.2f} dB"
        codec = "" if self.codec == fmt.DEFAULT_CODEC else f"{self.codec}, "
        kind = f"{self.dtype}, {codec}k={self.k}, {self.scale}, {self.codebook_name}"
        return f"QuantizedTensor({list(self.shape)}, {kind}{sqnr}, {self.device})"

    @property
    def device(self) -> torch.device:
        """Where the parts lie."""
        return next(iter(self.parts.values())).device

    @property
    def numel(self) -> int:
        """Elements of the source tensor."""
        return math.prod(self.shape)

    @property
    def cols(self) -> int:
        """Elements in a row of the matrix that was quantized."""
        return self.numel // self.rows

    @property
    def rows(self) -> int:
        """Rows of the matrix that was quantized."""
        return math.prod(next(iter(self.parts.values())).shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, codebook included."""
        return sum(t.numel() * t.element_size() for t in self.parts.values())

    @property
    def bits_per_weight(self) -> float:
        """8 * bytes of the parts / elements; codebooks are reported apart (docs/format.md section 2)."""
        return bits_per_weight(self.codec, "", (self.rows, self.cols), self.k)

    def matrices(self) -> dict[str, Tensor]:
        """The parts as matrices of ``rows`` rows, constants as they are."""
        kinds = part_kinds(self.codec)
        return {n: t if kinds[n] else t.reshape(-1, t.shape[-1]) for n, t in self.parts.items()}

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """See :func:`dequantize`."""
        return dequantize(self, dtype, out)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> QuantizedTensor:
        """The same tensor on another device. Its dtype is its source's: :meth:`dequantize` takes another one."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"to: a QuantizedTensor moves to a device; dequantize(dtype={device}) decodes it")
        return replace(self, parts={n: t.to(device, non_blocking=non_blocking) for n, t in self.parts.items()})

    def cpu(self) -> QuantizedTensor:
        """The same tensor in the CPU's memory."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int | None = None) -> QuantizedTensor:
        """The same tensor on a GPU, the current one by default."""
        return self.to("cuda" if device is None else device)


torch.serialization.add_safe_globals([QuantizedTensor])


def quantize(
    tensor: Tensor,
    k: int,
    *,
    scale: str = "mse",
    codebook: str | os.PathLike[str] | Tensor = "optimal",
    importance: Tensor | None = None,
    hessian: Tensor | None = None,
    transposed: bool = False,
    name: str = "tensor",
    codec: str = fmt.DEFAULT_CODEC,
    scale_block: int = fmt.BLOCK,
) -> QuantizedTensor:
    """Quantize a tensor to ``k`` bits a weight plus one scale byte per ``scale_block`` columns.

    Args:
        tensor: float32, bfloat16, float16 or float64 (rounded to float32 first), on the CPU or a CUDA device. A 2-D
            tensor is cut along its last dimension; others as docs/format.md section 1 says.
        k: bits stored of an index: 2 to 8, of the trellis 1 to 4.
        scale: ``"mse"`` tries several scale bytes a block and keeps the one of least squared error; ``"absmax"`` takes
            the block's largest magnitude.
        codebook: ``"optimal"``, ``"nf"``, ``"fit"`` (fitted to this tensor), a ``.json`` or ``.safetensors`` file, or a
            tensor of ascending levels: 2^k, of the trellis 2^(k+2).
        importance: ``[cols]`` weights of the squared error by column (``[E, cols]`` for fused experts), not negative.
        hessian: ``[cols, cols]``, the sum over tokens of x xᵀ of what the weight is multiplied by (``[E, cols, cols]``
            for fused experts): quantize with error feedback, for the least error of the products. ``importance`` then
            only weighs in fitting a codebook.
        transposed: the weight is stored ``[in, out]``, as GPT-2's are, so ``hessian`` is ``[rows, rows]`` (``[E, rows,
            rows]``).
        name: the tensor's name; a component ``experts`` makes a 3-D tensor a stack of matrices, and errors mention it.
        codec: how weights are coded: ``"planes"``, or ``"trellis"``, which has 1 to 2 dB less error at a size.
        scale_block: columns that share a scale: 32, or of the trellis 128 (then ``codec`` is ``"trellis/128"``).

    Returns:
        A :class:`QuantizedTensor` with ``sqnr_db`` and ``max_abs_err`` measured, on the tensor's device.

    Raises:
        TypeError: ``tensor`` is no tensor.
        ValueError: k, scale, dtype or shape cannot be quantized, or the importance does not fit.
        CodebookError: the codebook is not 2^k ascending finite levels.
        CodecError: there is no such codec.
        NonFiniteError: the tensor has NaN or infinite values.
        CalibrationError: the hessian cannot be factorised.
    """
    coder = get_codec(fmt.with_scale_block(codec, scale_block))
    _check_input(tensor, k, name, coder)
    shape = tuple(tensor.shape)
    w = _as_core_input(tensor.detach()).reshape(fmt.matrix_shape(name, shape)).contiguous()
    amax = _largest(w, name)
    weights = None if importance is None else _checked_importance(importance, w, name, shape)
    levels, codebook_name = _levels(coder, codebook, k, w, amax, weights)
    request = Request(k, amax, scale, levels, weights)
    if hessian is None:
        made = coder.encode(w, request)
    else:
        experts = shape[0] if fmt.is_fused_experts(name, shape) else 1
        made = _with_feedback(coder, w, request, _by_expert(hessian, w, experts, name, transposed), transposed)
    sqnr_db, max_abs_err = summarise(coder.stats(w, made))
    parts = {part.name: made[part.name].reshape(part.shape) for part in coder.parts(name, shape, k)}
    return QuantizedTensor(parts, shape, tensor.dtype, k, scale, codebook_name, sqnr_db, max_abs_err, coder.name)


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """The decoded values: one float32 multiply each, rounded once to the output's dtype.

    Args:
        q: a quantized tensor.
        dtype: of the result; the source's by default.
        out: contiguous tensor of the source's shape to write into instead; its dtype wins.

    Raises:
        ValueError: ``out`` does not fit, or ``dtype`` is not a floating type.
    """
    target = out.dtype if out is not None else dtype or q.dtype
    if out is not None and tuple(out.shape) != tuple(q.shape):
        raise ValueError(f"out: has shape {list(out.shape)}, needs {list(q.shape)}")
    codec, parts = get_codec(q.codec), q.matrices()
    if target == torch.float64:  # exact: the decode rule is float32
        wide = codec.decode(parts, q.cols, torch.float32).reshape(q.shape).double()
        return wide if out is None else out.copy_(wide)
    if target not in ops.FLOAT_DTYPES:
        raise ValueError(f"dtype: cannot decode to {target}")
    if out is None:
        return codec.decode(parts, q.cols, target).reshape(q.shape)
    codec.decode(parts, q.cols, target, out=out.view(q.rows, q.cols))
    return out


def summarise(row_stats: Tensor) -> tuple[float | None, float]:
    """SQNR in dB and the largest error from :func:`kbitq.ops.stats`, row sums added in row order.

    The SQNR is None where it is not finite (an all-zero or an exactly represented tensor).
    """
    table = row_stats.cpu().numpy()
    signal, noise = (float(np.add.accumulate(table[:, c])[-1]) for c in (0, 1))
    return sqnr_db(signal, noise), float(table[:, 2].max())


def sqnr_db(signal: float, noise: float) -> float | None:
    """10 * log10(signal / noise); None where that is not finite."""
    ratio = signal / noise if noise > 0 else 0.0
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def _check_input(tensor: Any, k: int, name: str, codec: Codec) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: a torch.Tensor is needed, not {type(tensor).__name__}")
    if k not in codec.ks:
        raise ValueError(f"k must be {codec.ks[0]} to {codec.ks[-1]}, got {k}")
    if tensor.dtype not in (*ops.FLOAT_DTYPES, torch.float64):
        raise ValueError(f"{name}: {tensor.dtype} cannot be quantized, only floating point of 16, 32 or 64 bits")
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise ValueError(
            f"{name}: shape {list(tensor.shape)} cannot be quantized, 2 dimensions and an element are needed"
        )


def _as_core_input(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _largest(w: Tensor, name: str) -> Tensor:
    """max |w|, float32 ``[1]``. Raises NonFiniteError."""
    amax, status = ops.scan(w)
    count, first = status.tolist()
    if count:
        raise NonFiniteError(
            f"{name}: {count} of {w.numel()} values are NaN or infinite, the first at flat index {first}",
            tensor=name,
            count=count,
            first=first,
        )
    return amax


def _levels(
    codec: Codec, codebook: Any, k: int, w: Tensor, amax: Tensor, weights: Tensor | None
) -> tuple[Tensor | None, str]:
    """The levels to quantize with, on the CPU, and the name of their kind."""
    if isinstance(codebook, str) and codebook == "fit":
        if not isinstance(codec, Planes):
            raise ValueError(f"codebook: the codec {codec.name} has no levels that could be fitted")
        return torch.as_tensor(fit.fit_tensor(w, k, amax, weights, codec).levels), "fit"
    levels, kind = codec.levels(codebook, k)
    return None if levels is None else torch.as_tensor(levels), kind


def _by_expert(hessian: Tensor, w: Tensor, experts: int, name: str, transposed: bool) -> Tensor:
    """An H for each expert, ``[experts, n, n]``. Raises ValueError where its shape does not fit the weight."""
    inputs = w.shape[0] // experts if transposed else w.shape[1]
    if tuple(hessian.shape) not in {(experts, inputs, inputs), *([(inputs, inputs)] if experts == 1 else [])}:
        wanted = [experts, inputs, inputs] if experts > 1 else [inputs, inputs]
        raise ValueError(f"{name}: hessian has shape {list(hessian.shape)}, needs {wanted}")
    return hessian.reshape(experts, inputs, inputs)


def _with_feedback(codec: Codec, w: Tensor, request: Request, hessians: Tensor, transposed: bool) -> dict[str, Tensor]:
    """The parts of a matrix, each expert of it with its own H, on the device of ``w``."""
    if not isinstance(codec, Planes):
        raise ValueError(f"hessian: the codec {codec.name} takes no error feedback")
    made = []
    for rows, h in zip(w.chunk(len(hessians)), hessians, strict=True):
        factor = feedback.factorise(h.to(w.device), transposed=transposed)
        tiles = rows.split(len(rows) if transposed else max(1, feedback.TILE_ELEMENTS[w.device.type] // w.shape[1]))
        made += [feedback.encode(codec, tile.contiguous(), request, factor) for tile in tiles]
    constant = part_kinds(codec.name)
    return {n: made[0][n] if constant[n] else torch.cat([parts[n] for parts in made]) for n in made[0]}


def _checked_importance(importance: Tensor, w: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    experts = shape[0] if fmt.is_fused_experts(name, shape) else 1
    allowed = {(w.shape[1],), (experts, w.shape[1])} if experts > 1 else {(w.shape[1],), (1, w.shape[1])}
    if tuple(importance.shape) not in allowed:
        raise ValueError(
            f"{name}: importance has shape {list(importance.shape)}, needs {[list(a) for a in sorted(allowed)]}"
        )
    return ops.prepare_importance(importance).to(w.device)
