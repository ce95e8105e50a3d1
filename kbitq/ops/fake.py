"""``torch.ops.kbitq.fake_integers`` and ``fake_bits``: quantized and back, with a straight-through gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kbitq.ops import codec


def _integers(rows: Tensor, scale: Tensor, zero: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
    codes = (rows.to(scale.dtype) / scale).round() + zero
    values = (codes.clamp(least, most) - zero) * scale
    return values.to(rows.dtype), (codes >= least) & (codes <= most)


def _bits(w: Tensor, levels: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    matrix, cols = w.contiguous(), w.shape[1]
    amax, _ = codec.scan(matrix)
    words, scales, book = codec.quantize(matrix, levels, amax=amax, scale=scale)
    ends = book.new_zeros(2 ** codec.bits_of(book))
    ends[-1] = book.abs().max()
    # What a block reaches is its scale times the largest level: a matrix of all ones in place of the indices.
    reach = codec.dequantize(torch.full_like(words, -1), scales, ends, cols, torch.float32)
    return codec.dequantize(words, scales, book, cols, w.dtype), matrix.abs() <= reach


def _like(w: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(w), torch.empty_like(w, dtype=torch.bool)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.inputs = len(inputs)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (within,) = ctx.saved_tensors
    return grad * within, *[None] * (ctx.inputs - 1)


codec.register(
    "fake_integers(Tensor rows, Tensor scale, Tensor zero, int least, int most) -> (Tensor, Tensor)", _integers, _like
)
codec.register("fake_bits(Tensor w, Tensor levels, str scale) -> (Tensor, Tensor)", _bits, _like)
for _name in ("fake_integers", "fake_bits"):
    torch.library.register_autograd(f"kbitq::{_name}", _backward, setup_context=_save, lib=codec.library)


def integers(rows: Tensor, scale: Tensor, zero: Tensor, least: int, most: int) -> Tensor:
    """``(clamp(round(rows / scale) + zero, least, most) - zero) * scale`` in the dtype of ``rows``.

    Args:
        rows: floating ``[R, n]``.
        scale: floating ``[R, 1]`` or ``[1, 1]``, positive; its precision is the one computed in.
        zero: int32 like ``scale``.
        least: the least code.
        most: the largest code.

    Its gradient is that of the identity where no code was clamped, and 0 elsewhere.
    """
    return torch.ops.kbitq.fake_integers(rows, scale, zero, least, most)[0]


def bits(w: Tensor, levels: Tensor, scale: str) -> Tensor:
    """A matrix as codec ``planes`` would hold it, with the gradient of the identity within each block's range.

    Args:
        w: float32, bfloat16 or float16 ``[rows, cols]``, finite.
        levels: float32 ``[2^K]``, normalised, on the device of ``w``.
        scale: ``"mse"`` or ``"absmax"``.
    """
    return torch.ops.kbitq.fake_bits(w, levels, scale)[0]
