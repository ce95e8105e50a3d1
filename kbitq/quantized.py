"""One quantized tensor in memory, and the two functions that make it and turn it back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kbitq import format as fmt
from kbitq import ops
from kbitq.codecs import codebooks, fit
from kbitq.errors import NonFiniteError

if TYPE_CHECKING:
    import os


@dataclass(repr=False)
class QuantizedTensor:
    """The triple that replaces a tensor (docs/format.md section 2), and what is known of its source.

    Attributes:
        packed: int32 ``[rows, nblk * K]`` bit planes; ``[E, a, nblk * K]`` for fused experts.
        absmax: uint8 ``[rows, nblk]``, one E4M4 byte a block; ``[E, a, nblk]`` for fused experts.
        codebook: float32 ``[2^K]``, ascending.
        shape: of the source tensor.
        dtype: of the source tensor.
        scale: the rule that chose the scales, ``"absmax"`` or ``"mse"``.
        codebook_name: ``"optimal"``, ``"nf"``, ``"custom"``, ...
        sqnr_db: signal to quantization noise in decibels, if measured.
        max_abs_err: largest |w - w'|, if measured.
    """

    packed: Tensor
    absmax: Tensor
    codebook: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: str = "mse"
    codebook_name: str = "optimal"
    sqnr_db: float | None = None
    max_abs_err: float | None = None

    def __repr__(self) -> str:
        sqnr = "" if self.sqnr_db is None else f", {self.sqnr_db:.2f} dB"
        kind = f"{self.dtype}, k={self.k}, {self.scale}, {self.codebook_name}"
        return f"QuantizedTensor({list(self.shape)}, {kind}{sqnr}, {self.packed.device})"

    @property
    def k(self) -> int:
        """Bits of an index."""
        return self.codebook.shape[0].bit_length() - 1

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
        return math.prod(self.packed.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the triple, codebook included."""
        return sum(t.numel() * t.element_size() for t in (self.packed, self.absmax, self.codebook))

    @property
    def bits_per_weight(self) -> float:
        """8 * (packed + absmax bytes) / elements; codebooks are reported apart (docs/format.md section 2)."""
        return 8 * (4 * self.packed.numel() + self.absmax.numel()) / self.numel

    def matrices(self) -> tuple[Tensor, Tensor]:
        """``packed`` and ``absmax`` as matrices of ``rows`` rows."""
        return self.packed.reshape(self.rows, -1), self.absmax.reshape(self.rows, -1)

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """See :func:`dequantize`."""
        return dequantize(self, dtype, out)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same tensor on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("packed", "absmax", "codebook")}
        return QuantizedTensor(**{**self.__dict__, **moved})


def quantize(
    tensor: Tensor,
    k: int,
    *,
    scale: str = "mse",
    codebook: str | os.PathLike[str] | Tensor = "optimal",
    importance: Tensor | None = None,
    name: str = "tensor",
) -> QuantizedTensor:
    """Quantize a tensor to ``k`` bits a weight plus one scale byte per block of 32.

    Args:
        tensor: float32, bfloat16, float16 or float64 (rounded to float32 first), on the CPU or a CUDA device. A 2-D
            tensor is cut along its last dimension; others as docs/format.md section 1 says.
        k: bits of an index, 2 to 8.
        scale: ``"mse"`` tries several scale bytes a block and keeps the one of least squared error; ``"absmax"`` takes
            the block's largest magnitude.
        codebook: ``"optimal"``, ``"nf"``, ``"fit"`` (fitted to this tensor), a ``.json`` or ``.safetensors`` file, or a
            tensor of 2^k ascending levels.
        importance: ``[cols]`` weights of the squared error by column (``[E, cols]`` for fused experts), not negative.
        name: the tensor's name; a component ``experts`` makes a 3-D tensor a stack of matrices, and errors mention it.

    Returns:
        A :class:`QuantizedTensor` with ``sqnr_db`` and ``max_abs_err`` measured, on the tensor's device.

    Raises:
        ValueError: k, scale, dtype or shape cannot be quantized, or the importance does not fit.
        CodebookError: the codebook is not 2^k ascending finite levels.
        NonFiniteError: the tensor has NaN or infinite values.
    """
    if not fmt.K_MIN <= k <= fmt.K_MAX:
        raise ValueError(f"k must be {fmt.K_MIN} to {fmt.K_MAX}, got {k}")
    if tensor.dtype not in (*ops.FLOAT_DTYPES, torch.float64):
        raise ValueError(f"{name}: {tensor.dtype} cannot be quantized, only floating point of 16, 32 or 64 bits")
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise ValueError(
            f"{name}: shape {list(tensor.shape)} cannot be quantized, 2 dimensions and an element are needed"
        )
    shape = tuple(tensor.shape)
    w = _as_core_input(tensor.detach()).reshape(fmt.matrix_shape(name, shape)).contiguous()
    amax, status = ops.scan(w)
    count, first = status.tolist()
    if count:
        raise NonFiniteError(
            f"{name}: {count} of {w.numel()} values are NaN or infinite, the first at flat index {first}",
            tensor=name,
            count=count,
            first=first,
        )
    weights = None if importance is None else _checked_importance(importance, w, name, shape)
    if isinstance(codebook, str) and codebook == "fit":
        chosen, codebook_name = fit.fit_tensor(w, k, amax, weights).levels, "fit"
    else:
        chosen, codebook_name = codebooks.levels(codebook, k)
    levels = torch.as_tensor(chosen).to(w.device)
    packed, absmax, stored = ops.quantize(w, levels, amax=amax, importance=weights, scale=scale)
    sqnr_db, max_abs_err = summarise(ops.stats(w, packed, absmax, stored))
    return QuantizedTensor(
        packed.reshape(fmt.packed_shape(name, shape, k)),
        absmax.reshape(fmt.absmax_shape(name, shape)),
        stored,
        shape,
        tensor.dtype,
        scale,
        codebook_name,
        sqnr_db,
        max_abs_err,
    )


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
    packed, absmax = q.matrices()
    if target == torch.float64:  # exact: the decode rule is float32
        wide = ops.dequantize(packed, absmax, q.codebook, q.cols).reshape(q.shape).double()
        return wide if out is None else out.copy_(wide)
    if target not in ops.FLOAT_DTYPES:
        raise ValueError(f"dtype: cannot decode to {target}")
    if out is None:
        return ops.dequantize(packed, absmax, q.codebook, q.cols, target).reshape(q.shape)
    ops.dequantize(packed, absmax, q.codebook, q.cols, out=out.view(q.rows, q.cols))
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
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def _as_core_input(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _checked_importance(importance: Tensor, w: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    experts = shape[0] if fmt.is_fused_experts(name, shape) else 1
    allowed = {(w.shape[1],), (experts, w.shape[1])} if experts > 1 else {(w.shape[1],), (1, w.shape[1])}
    if tuple(importance.shape) not in allowed:
        raise ValueError(
            f"{name}: importance has shape {list(importance.shape)}, needs {[list(a) for a in sorted(allowed)]}"
        )
    return ops.prepare_importance(importance).to(w.device)
