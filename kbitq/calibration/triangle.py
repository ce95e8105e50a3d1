"""Symmetric matrices as files have them: the lower triangle row by row, of each block on the diagonal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BAND = 1024  # rows that are mirrored at once


def blocks(columns: int, block: int | None) -> list[range]:
    """The columns of each block on the diagonal; ``block`` None: one block of all."""
    size = block or columns
    return [range(start, min(start + size, columns)) for start in range(0, columns, size)]


def triangle_elements(columns: int, block: int | None = None) -> int:
    """Elements of the lower triangles of all blocks."""
    return sum(len(part) * (len(part) + 1) // 2 for part in blocks(columns, block))


def triangle(matrix: Tensor) -> Iterator[Tensor]:
    """The lower triangle of a matrix ``[n, n]``, float32 on the CPU, row by row in contiguous 1-D pieces."""
    rows = matrix.shape[0]
    for start in range(0, rows, _BAND):
        band = matrix[start : start + _BAND, : start + _BAND].float()
        if band.is_cuda:  # gathered there: half as much to copy, and page-locked memory takes it five times as fast
            lower = band[torch.ones_like(band, dtype=torch.bool).tril_(start)]
            yield torch.empty(lower.shape, pin_memory=True).copy_(lower)
        else:
            yield torch.cat([band[i, : start + i + 1] for i in range(len(band))])


def lower(flat: Tensor, columns: int) -> Tensor:
    """The matrix ``[columns, columns]`` with the lower triangle ``flat``, float32, and zeros above; on its device."""
    made, at = torch.zeros(columns, columns, device=flat.device), 0
    if flat.is_cuda:
        for start in range(0, columns, _BAND):
            band = made[start : start + _BAND, : start + _BAND]
            count = triangle_elements(start + len(band)) - at
            band.masked_scatter_(torch.ones_like(band, dtype=torch.bool).tril_(start), flat[at : at + count])
            at += count
        return made
    rows, values = made.numpy(), flat.numpy()
    for i in range(columns):
        rows[i, : i + 1] = values[at : at + i + 1]
        at += i + 1
    return made


def symmetric(flat: Tensor, columns: int) -> Tensor:
    """The matrix ``[columns, columns]`` whose lower triangle is ``flat``, both float32, on its device."""
    made = lower(flat, columns)
    for start in range(0, columns, _BAND):
        end = min(start + _BAND, columns)
        made[:start, start:end] = made[start:end, :start].T
        corner = made[start:end, start:end]
        corner += corner.tril(-1).T
    return made
