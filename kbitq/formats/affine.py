"""Codes with a scale, and perhaps a zero point and a bias, for groups of columns: what most formats come down to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kbitq.errors import CheckpointError
from kbitq.formats.base import StoredValues
from kbitq.formats.scales import Scales
from kbitq.formats.tables import scales
from kbitq.ops.code_stream import decode_codes, unpack_codes
from kbitq.text_safety import shown

_WORD_BITS = 32
_FLAT_ROW = 1 << 14  # codes of a flat stream that one thread takes at a time


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


def decode(
    codes: Tensor,
    bits: int,
    cols: int,
    scale: Tensor,
    zero: Tensor | None,
    groups: Groups,
    out: Tensor | None = None,
) -> Tensor:
    """``(code - zero) * scale`` in float32, rounded once to the dtype of ``scale``.

    Args:
        codes: a dense stream for each row.
        bits: of a code.
        cols: codes of a row.
        scale: ``[rows, groups]``.
        zero: ``[rows, groups]`` whole numbers, or None.
        groups: of the columns.
        out: where the result goes; None: into a new tensor.

    Returns:
        ``[rows, cols]``.
    """
    return decode_codes(
        codes, bits, cols, scale, scale.dtype, zero=zero, group_size=groups.size, group_of=groups.of_column, out=out
    )


def decode_flat(
    data: Tensor,
    count: int,
    bits: int,
    scale: Tensor,
    block: int,
    levels: Tensor,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """``levels[code] * scale`` of a stream of 4-bit codes, the first in a byte's high half: ``[count]`` of ``dtype``.

    Args:
        data: uint8, beginning where a block does.
        count: of codes.
        bits: of a code.
        scale: float32, one for each block.
        block: codes that share a scale; even.
        levels: float32 ``[2^bits]``.
        dtype: of the result.
        out: ``[count]`` of ``dtype``: where the result goes; None: into a new tensor.
    """
    if out is None:
        out = torch.empty(count, dtype=dtype)
    width = block * max(1, _FLAT_ROW // block)
    whole = count // width
    for rows, cols, start in ((whole, width, 0), (1, count - whole * width, whole * width)):
        if rows and cols:
            mine, place = data[start * bits // 8 :], out[start : start + rows * cols].view(rows, cols)
            starts = torch.arange(rows, dtype=torch.int64) * (width * bits // 8)
            of_rows = scale[start // block :][: rows * -(-cols // block)].view(rows, -1)
            decode_codes(
                mine, bits, cols, of_rows, dtype,
                table=levels, group_size=block, starts=starts, order="high_first", out=place,
            )  # fmt: skip
    return out


def block_numbers(values: StoredValues, of: Scales, first: int, count: int, groups: int, per_matrix: int) -> Tensor:
    """The numbers of some rows, float32 ``[count, groups]``, of which ``of.rows`` rows of a matrix share each."""
    per_row = -(-per_matrix // of.rows)
    rows = torch.arange(first, first + count)
    index = rows // per_matrix * per_row + rows % per_matrix // of.rows
    start, stop = int(index[0]), int(index[-1]) + 1
    raw = values.elements(of.name, start * groups, (stop - start) * groups).view(-1, groups)
    found = scales(raw, of.kind)
    if of.divisor:
        found = found / values.whole(of.divisor).float().view(())
    if of.factor:
        found = found * values.whole(of.factor).float().view(())
    return found if stop - start == count else found[index - start]


def stream_down(values: StoredValues, name: str, bits: int, first: int, count: int, groups: int, rows: int) -> Tensor:
    """Some rows of codes ``[rows, groups]`` that are packed down each column, float32 ``[count, groups]``."""
    start = first // _WORD_BITS * _WORD_BITS
    stop = min(-(-(first + count) // _WORD_BITS) * _WORD_BITS, rows)
    first_word, words = start * bits // _WORD_BITS, -(-(stop - start) * bits // _WORD_BITS)
    packed = values.rows(name, first_word, words).view(words, groups).t().contiguous()
    return unpack_codes(packed, bits, stop - start)[:, first - start : first - start + count].t().float()


def gptq_zeros(words: Tensor, bits: int, cols: int, version: int) -> Tensor:
    """GPTQ's zero points, uint8 ``[groups, cols]``, from int32 words ``[groups, cols * bits / 32]``.

    Version 1 has them less one. GPTQModel adds it to whole words, so that a zero point of 2^b carries into the next,
    and to the codes themselves where they cross words.
    """
    if version == 1 and _WORD_BITS % bits == 0:
        words = words + sum(1 << at for at in range(0, _WORD_BITS, bits))
    zeros = unpack_codes(words, bits, cols)
    return (zeros + 1) & ((1 << bits) - 1) if version == 1 and _WORD_BITS % bits else zeros
