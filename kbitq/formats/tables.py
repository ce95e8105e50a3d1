"""What small floating-point codes stand for, and scales that are stored as bytes, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_EXPONENT_BIAS = 127


def table(name: str) -> Tensor | None:
    """The values of all codes, float32 ``[2^bits]``; None for ``""``, where a code stands for itself.

    Names: ``e2m1``, ``e2m1_one_zero`` (its -0 is 0), ``e4m3``, ``e5m2``, ``int8``.
    """
    if name.startswith("e2m1"):
        negative = [-value for value in _E2M1]
        return torch.tensor(_E2M1 + ([0.0, *negative[1:]] if name == "e2m1_one_zero" else negative))
    codes = torch.arange(256, dtype=torch.uint8)
    views = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
    return codes.view(views[name]).float() if name else None


def exponents(raw: Tensor) -> Tensor:
    """2^(b - 127) of each byte, float32: e8m0, but for 255, which is infinity here as it is in the packages."""
    return torch.ldexp(torch.ones(raw.shape), raw.to(torch.int32) - _EXPONENT_BIAS)


def scales(raw: Tensor, kind: str) -> Tensor:
    """Stored scales in float32. ``kind``: ``float`` (of any dtype, FP8 too), ``e8m0`` or ``e4m3`` (both in bytes)."""
    if kind == "e8m0":
        return exponents(raw)
    return (raw.view(torch.float8_e4m3fn) if kind == "e4m3" else raw).float()
