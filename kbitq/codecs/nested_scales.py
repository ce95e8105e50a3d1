"""Scales that are quantized too, as bitsandbytes does it: their mean is taken off, then blocks of 256 of them share a
scale and each becomes a byte of an 8-bit map (Dettmers et al. 2023, "double quantization")."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

NESTED_BLOCK = 256
"""Scales that share a scale."""

_GRID = 65535  # steps of [-1, 1] that scales are rounded to before their level is looked up
_ONE_THREAD = 32768  # values: torch adds up more of them in as many parts as it has threads


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """The 256 ascending levels of 8-bit dynamic quantization (Dettmers 2021): float32 in (-1, 1], on ``device``.

    Seven decades; each next one halves the steps within its decade.
    """
    levels = [0.0, 1.0]
    for decade in range(7):
        ends = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (10.0 ** (decade - 6) * ((ends[:-1] + ends[1:]) / 2)).tolist()
        levels += [*middles, *(-m for m in middles)]
    return torch.tensor(sorted(levels), dtype=torch.float32, device=device)


def mean(scales: Tensor) -> Tensor:
    """The mean of scales, float32 ``[]``, as torch computes it with one thread, however many there are."""
    threads = torch.get_num_threads()
    if scales.is_cuda or scales.numel() < _ONE_THREAD or threads == 1:
        return scales.mean()
    torch.set_num_threads(1)
    try:
        return scales.mean()
    finally:
        torch.set_num_threads(threads)


def nest(scales: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize scales ``[n]``, float32.

    Args:
        scales: beginning where a block of 256 does.
        offset: float32 ``[]``, their mean, or that of more scales.

    Returns:
        Codes, uint8 ``[n]``, and the scale of each block, float32 ``[ceil(n / 256)]``.
    """
    rest = scales - offset
    padded = torch.nn.functional.pad(rest, (0, -rest.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = padded.abs().amax(1)
    share = rest * spread(1 / largest, rest.numel())
    steps = ((share + 1) * 0.5 * _GRID + 0.5).nan_to_num(0.0).clamp(0, _GRID)
    return _nearest_on_grid(scales.device)[steps.long()], largest


def unnest(codes: Tensor, largest: Tensor, offset: Tensor) -> Tensor:
    """The scales again, float32 ``[n]``."""
    levels = dynamic_map(codes.device)[codes.long()]
    return levels * spread(largest, levels.numel()) + offset


def spread(largest: Tensor, count: int) -> Tensor:
    """Each scale of a block of scales, once for each scale in it."""
    return largest.repeat_interleave(NESTED_BLOCK)[:count]


@cache
def _nearest_on_grid(device: torch.device) -> Tensor:
    """The code of each step of the grid."""
    levels, steps = dynamic_map(device), torch.arange(_GRID + 1, device=device).double()
    middles = (levels[:-1] + levels[1:]) / 2
    return torch.bucketize((2 * steps / _GRID - 1).float(), middles).to(torch.uint8)
