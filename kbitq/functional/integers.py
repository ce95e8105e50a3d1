"""Integers of 4 and 8 bits: one scale for a tensor, a channel, a token or a group, symmetric or affine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kbitq.codecs.ranges import choose_scale, code_range, find_range

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GRANULARITIES = ("tensor", "channel", "token", "group")
"""What shares a scale: all of it; each slice of the first dimension; each row of the last dimension; each group of
neighbours in a row."""


@dataclass(frozen=True)
class IntTensor:
    """A tensor as integers: ``value = (code - zero) * scale``.

    Attributes:
        codes: int8 or uint8 in the tensor's shape; of 4 bits, uint8 ``[..., last / 2]`` with the first of two
            neighbours in the low half (signed codes in two's complement).
        scale: float32 (float64 for float64), one for each row of :func:`rows_of`.
        zero: int32 like ``scale``; None if it is 0 everywhere.
        shape: of the tensor.
        dtype: of the tensor that was quantized.
        bits: 4 or 8.
        signed: whether codes are.
        per: one of :data:`GRANULARITIES`.
        group: neighbours that share a scale where ``per`` is ``"group"``.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    bits: int = 8
    signed: bool = True
    per: str = "channel"
    group: int = 128

    def unpacked(self) -> Tensor:
        """The codes in the tensor's shape: int8 if they are signed, else uint8."""
        if self.bits == 8:
            return self.codes
        halves = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(-2)
        return ((halves ^ 8).to(torch.int8) - 8) if self.signed else halves


def rows_of(w: Tensor, per: str, group: int = 128) -> Tensor:
    """``w`` as a matrix whose rows have a scale each.

    Args:
        w: of any shape.
        per: one of :data:`GRANULARITIES`.
        group: where ``per`` is ``"group"``: it must divide the last dimension.

    Raises:
        ValueError: ``per`` is another, or the shape does not allow it.
    """
    if per not in GRANULARITIES:
        raise ValueError(f"per must be one of {', '.join(GRANULARITIES)}, not {per!r}")
    if per != "tensor" and w.dim() == 0:
        raise ValueError(f"w: has no dimension to have a scale per {per}")
    if per == "tensor":
        return w.reshape(1, -1)
    if per == "channel":
        return w.reshape(w.shape[0], -1)
    if per == "group" and (group < 1 or w.shape[-1] % group):
        raise ValueError(f"group must divide the last dimension {w.shape[-1]}, not {group}")
    return w.reshape(-1, group if per == "group" else w.shape[-1])


def quantize_int(
    w: Tensor,
    bits: int = 8,
    per: str = "channel",
    symmetric: bool = True,
    signed: bool = True,
    group: int = 128,
    observer: str = "minmax",
) -> IntTensor:
    """Quantize a tensor to integers, each code the nearest (ties to even).

    Args:
        w: float64, float32, bfloat16 or float16, finite.
        bits: 8, or 4 with an even last dimension.
        per: one of :data:`GRANULARITIES`.
        symmetric: whether 0 lies in the middle of the codes; else the range is ``low`` to ``high``.
        signed: whether codes are.
        group: neighbours that share a scale where ``per`` is ``"group"``.
        observer: how a range is found: ``"minmax"``, ``"percentile"`` or ``"mse"`` (:func:`find_range`).

    Raises:
        ValueError: an argument is not one of these.
    """
    if w.dtype not in _FLOATS:
        raise ValueError(f"w must be a float of 16, 32 or 64 bits, not {w.dtype}")
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    if bits == 4 and (w.dim() == 0 or w.shape[-1] % 2):
        raise ValueError("w: 4-bit codes need an even last dimension")
    rows = rows_of(w.detach(), per, group)
    rows = rows if w.dtype == torch.float64 else rows.float()
    low, high = find_range(rows, observer, bits, symmetric, signed)
    scale, zero = choose_scale(low, high, bits, symmetric, signed)
    least, most = code_range(bits, signed)
    codes = ((rows / scale[:, None]).round() + zero[:, None]).clamp(least, most).view(w.shape)
    stored = _pack4(codes) if bits == 4 else codes.to(torch.int8 if signed else torch.uint8)
    plain = symmetric and signed
    return IntTensor(stored, scale, None if plain else zero, w.shape, w.dtype, bits, signed, per, group)


def dequantize_int(q: IntTensor, dtype: torch.dtype | None = None) -> Tensor:
    """``(code - zero) * scale`` in the precision of the scale, rounded once to ``dtype`` (default: its own)."""
    rows = rows_of(q.unpacked(), q.per, q.group).to(q.scale.dtype)
    if q.zero is not None:
        rows = rows - q.zero[:, None]
    return (rows * q.scale[:, None]).view(q.shape).to(dtype or q.dtype)


def _pack4(codes: Tensor) -> Tensor:
    halves = codes.to(torch.int16).bitwise_and(15).to(torch.uint8)
    return torch.bitwise_or(halves[..., 0::2], halves[..., 1::2] << 4)
