"""Weights whose codes lie along their rows: compressed-tensors, mlx, torchao and others differ only in what is here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kbitq.format import matrix_shape
from kbitq.formats.base import ForeignWeight, StoredValues
from kbitq.formats.scales import Scales

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RowCodes(ForeignWeight):
    """A weight ``[..., out, in]``: ``(table[code] - zero) * scale + bias``.

    Attributes:
        bits: of a code, in a dense stream along each row.
        scale: of each block.
        table: of ``tables.table``.
        offset: subtracted from every code, where no zero points are stored.
        zero: of each block.
        bias: of each block.
        index: a stored tensor, the group of each column; empty: groups are runs.
        round_each: whether every operation is rounded to ``dtype``.
    """

    bits: int
    scale: Scales
    table: str = ""
    offset: int = 0
    zero: Scales | None = None
    bias: Scales | None = None
    index: str = ""
    round_each: bool = False

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        import torch

        from kbitq.formats.tables import table
        from kbitq.ops.code_stream import decode_codes
        from kbitq.ops.dtypes import TORCH_DTYPES

        cols = self.shape[-1]
        wide = matrix_shape(self.name, self.shape)[1]
        first, count = first_row * (wide // cols), rows * (wide // cols)
        width = values.nbytes(self.stored[0]) // math.prod(self.shape[:-1])
        codes = values.raw(self.stored[0], first * width, count * width).view(count, width)
        scale, zero, bias = (self._of_rows(values, of, first, count) for of in (self.scale, self.zero, self.bias))
        assert scale is not None
        if zero is None and self.offset:
            zero = torch.full_like(scale, self.offset)
        size, of_column = self._groups(values)
        decoded = decode_codes(
            codes, self.bits, cols, scale, TORCH_DTYPES[self.dtype], table=table(self.table), zero=zero, bias=bias,
            group_size=size, group_of=of_column, round_each=self.round_each,
            out=None if out is None else out.view(count, cols),
        )  # fmt: skip
        return decoded.view(rows, wide) if out is None else out

    def _groups(self, values: StoredValues) -> tuple[int, Tensor | None]:
        from kbitq.formats import affine

        count = -(-self.shape[-1] // self.scale.cols)
        groups = affine.Groups.given(values, (self.index,) if self.index else (), count, self.shape[-1])
        return (self.scale.cols if groups.of_column is None else 0), groups.of_column

    def _of_rows(self, values: StoredValues, of: Scales | None, first: int, count: int) -> Tensor | None:
        """The numbers of some rows, float32 ``[count, groups]``."""
        from kbitq.formats import affine

        if of is None:
            return None
        groups = -(-self.shape[-1] // of.cols)
        if of.kind == "stream":
            return affine.stream_down(values, of.name, of.bits, first, count, groups, self.shape[-2])
        return affine.block_numbers(values, of, first, count, groups, self.shape[-2])
