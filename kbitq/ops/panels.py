"""Products with a weight that is decoded a panel at a time: as many of its rows as a bounded buffer holds, then the
library's matmul. For many rows of x, whatever the codec and the order of the weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """A weight ``[rows, cols]`` that can be decoded by rows.

    Attributes:
        rows: of the weight.
        cols: of the weight.
        codebook: float32 ``[levels]``, or ``[G, levels]`` with one for each of G equal groups of rows.
        decode: ``decode(begin, end, levels, out)`` writes rows ``[begin, end)``, which share ``levels``, to ``out``.
        step: panels begin at multiples of so many rows.
    """

    rows: int
    cols: int
    codebook: Tensor
    decode: Callable[[int, int, Tensor, Tensor], object]
    step: int = 1

    def panels(self, dtype: torch.dtype, device: torch.device, budget: int) -> Iterator[tuple[int, int, Tensor]]:
        """``(begin, end, weights [end - begin, cols])``, one after the other in one buffer of ``budget`` bytes."""
        groups = self.codebook if self.codebook.dim() == 2 else self.codebook[None]
        size = self.rows // groups.shape[0]
        limit = max(budget // (max(self.cols, 1) * dtype.itemsize) // self.step, 1) * self.step
        buffer = torch.empty((min(limit, size), self.cols), dtype=dtype, device=device)
        for group, levels in enumerate(groups):
            for begin in range(group * size, (group + 1) * size, limit):
                end = min(begin + limit, (group + 1) * size)
                weights = buffer[: end - begin]
                self.decode(begin, end, levels, weights)
                yield begin, end, weights


def multiply(x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor, dtype: torch.dtype, budget: int) -> None:
    """``out [M, rows] = x [M, cols] W^T (+ bias)``, multiplied in ``dtype``.

    Raises:
        ValueError: bias is not ``[rows]``.
    """
    if bias is not None and tuple(bias.shape) != (weight.rows,):
        raise ValueError(f"bias: has shape {list(bias.shape)}, needs [{weight.rows}]")
    left = x.to(dtype)
    for begin, end, weights in weight.panels(dtype, x.device, budget):
        columns = out[:, begin:end]
        product = columns if dtype == out.dtype else None  # written in place where no cast is needed
        if bias is None:
            product = torch.mm(left, weights.t(), out=product)
        else:
            product = torch.addmm(bias[begin:end].to(dtype), left, weights.t(), out=product)
        if dtype != out.dtype:
            columns.copy_(product)


def multiply_transposed(grad: Tensor, weight: Weight, out: Tensor, dtype: torch.dtype, budget: int) -> None:
    """``out [M, cols] = grad [M, rows] W``, multiplied in ``dtype``, panel by panel into a float32 sum."""
    left = grad.to(dtype)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for begin, end, weights in weight.panels(dtype, grad.device, budget):
        total += torch.mm(left[:, begin:end], weights)
    out.copy_(total)
