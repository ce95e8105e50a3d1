"""Ranges for integers, found from the values: minimum and maximum, a percentile, or the least squared error; and the
scale and zero point of a range."""

from __future__ import annotations

import torch
from torch import Tensor

OBSERVERS = ("minmax", "percentile", "mse")
"""How a range is found."""

PERCENTILE = 0.999
"""Share of the values that the range of ``percentile`` holds (symmetric ranges: of the magnitudes)."""

SHRINKS = tuple(1 - i / 100 for i in range(0, 80, 2))
"""What ``mse`` multiplies the range by; the best of them is kept for each row."""


def code_range(bits: int, signed: bool) -> tuple[int, int]:
    """The least and the largest code: -128 and 127 of 8 signed bits. ValueError unless ``bits`` is 2..16."""
    if not 2 <= bits <= 16:
        raise ValueError(f"bits must be 2..16, not {bits}")
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def choose_scale(
    low: Tensor, high: Tensor, bits: int, symmetric: bool = True, signed: bool = True
) -> tuple[Tensor, Tensor]:
    """Scale and zero point, each like ``low``, for values from ``low`` to ``high``.

    Args:
        low: floating; what is above 0 counts as 0, so that 0 has a code.
        high: likewise below.
        bits: of a code.
        symmetric: whether the zero point is the middle of the codes (0 if they are signed).
        signed: whether codes are.

    Returns:
        ``(scale, zero)``: of ``low``'s dtype, positive, and int32.
    """
    least, most = code_range(bits, signed)
    low, high = low.clamp(max=0), high.clamp(min=0)
    middle = 0 if signed else 1 << bits - 1
    if symmetric:
        scale = torch.maximum(-low, high) / (most - middle)
    else:
        scale = (high - low) / (most - least)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if symmetric:
        return scale, torch.full_like(scale, middle, dtype=torch.int32)
    return scale, (least - low / scale).round().clamp(least, most).int()


def find_range(
    rows: Tensor, observer: str = "minmax", bits: int = 8, symmetric: bool = True, signed: bool = True
) -> tuple[Tensor, Tensor]:
    """The least and the largest value that each row's codes should reach.

    Args:
        rows: floating ``[R, n]``, finite.
        observer: one of :data:`OBSERVERS`.
        bits: of a code, which ``mse`` asks for.
        symmetric: as of ``quantize_int``.
        signed: likewise.

    Returns:
        ``(low, high)``, each ``[R]`` in the dtype of ``rows``.

    Raises:
        ValueError: there is no such observer.
    """
    if observer not in OBSERVERS:
        raise ValueError(f"observer must be one of {', '.join(OBSERVERS)}, not {observer!r}")
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0]), rows.new_zeros(rows.shape[0])
    low, high = rows.amin(1), rows.amax(1)
    if observer == "percentile":
        return _percentile(rows, symmetric)
    return _least_error(rows, low, high, bits, symmetric, signed) if observer == "mse" else (low, high)


def _percentile(rows: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    ordered = (rows.abs() if symmetric else rows).sort(1).values
    last = rows.shape[1] - 1
    if symmetric:
        high = ordered[:, round(last * PERCENTILE)]
        return -high, high
    share = round(last * (1 - PERCENTILE) / 2)
    return ordered[:, share], ordered[:, last - share]


def _least_error(
    rows: Tensor, low: Tensor, high: Tensor, bits: int, symmetric: bool, signed: bool
) -> tuple[Tensor, Tensor]:
    least, most = code_range(bits, signed)
    best = torch.full_like(low, float("inf"))
    shrink = torch.ones_like(low)
    for factor in SHRINKS:
        scale, zero = choose_scale(low * factor, high * factor, bits, symmetric, signed)
        codes = ((rows / scale[:, None]).round() + zero[:, None]).clamp(least, most)
        error = ((codes - zero[:, None]) * scale[:, None] - rows).square().sum(1)
        shrink = torch.where(error < best, torch.full_like(shrink, factor), shrink)
        best = torch.minimum(best, error)
    return low * shrink, high * shrink
