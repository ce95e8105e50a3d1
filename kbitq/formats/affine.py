"""Codes with a scale, and perhaps a zero point, for groups of columns: what most formats come down to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kbitq.errors import CheckpointError
from kbitq.formats.base import StoredValues
from kbitq.ops.code_stream import decode_codes, unpack_codes
from kbitq.text_safety import shown


@dataclass(frozen=True)
class Groups:
    """Which group a column is of: runs of ``size`` columns, or, with ``of_column`` (int32 ``[cols]``), any."""

    size: int
    of_column: Tensor | None = None

    @classmethod
    def given(cls, values: StoredValues, index: Sequence[str], groups: int, cols: int) -> Groups:
        """Groups of equal runs, or those that the stored tensor ``index`` (names: none or one) says.

        Raises CheckpointError where it names a group that there is not.
        """
        size = -(-cols // groups)
        if not index:
            return cls(size)
        of_column = values.whole(index[0]).to(torch.int32)
        if of_column.numel() and not 0 <= int(of_column.min()) <= int(of_column.max()) < groups:
            raise CheckpointError(f"tensor {shown(index[0])} names a group of columns that there is not")
        runs = torch.arange(cols, dtype=torch.int32) // size
        return cls(size) if of_column.equal(runs) else cls(size, of_column)


def decode(codes: Tensor, bits: int, cols: int, scale: Tensor, zero: Tensor | None, groups: Groups) -> Tensor:
    """``(code - zero) * scale`` in float32, rounded once to the dtype of ``scale``.

    Args:
        codes: a dense stream for each row.
        bits: of a code.
        cols: codes of a row.
        scale: ``[rows, groups]``.
        zero: ``[rows, groups]`` whole numbers, or None.
        groups: of the columns.

    Returns:
        ``[rows, cols]``.
    """
    return decode_codes(
        codes, bits, cols, scale, scale.dtype, zero=zero, group_size=groups.size, group_of=groups.of_column
    )


def gptq_zeros(words: Tensor, bits: int, cols: int, version: int) -> Tensor:
    """GPTQ's zero points, uint8 ``[groups, cols]``, from int32 words ``[groups, cols * bits / 32]``.

    Version 1 has them less one. GPTQModel adds it to whole words, so that a zero point of 2^b carries into the next,
    and to the codes themselves where they cross words.
    """
    if version == 1 and 32 % bits == 0:
        words = words + sum(1 << at for at in range(0, 31, bits)) if bits > 1 else words
    zeros = unpack_codes(words, bits, cols)
    return (zeros + 1) & ((1 << bits) - 1) if version == 1 and 32 % bits else zeros
