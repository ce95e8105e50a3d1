"""Codes of other tools' formats, on the CPU: a few bits for each weight, to bytes, from bytes and on to values."""

from __future__ import annotations

import torch
from torch import Tensor

from kbitq._core import core

WORD_BITS = 32


def unpack_codes(
    data: Tensor,
    bits: int,
    cols: int,
    *,
    starts: Tensor | None = None,
    shifts: Tensor | None = None,
    order: str = "stream",
) -> Tensor:
    """Codes as bytes, uint8 ``[rows, cols]``.

    Args:
        data: any dtype, contiguous; ``[rows, ...]`` unless ``starts`` says where rows begin.
        bits: of a code, 1 to 8.
        cols: codes of a row.
        starts: int64 ``[rows]``, the byte of ``data`` at which the codes of a row begin.
        shifts: int32 ``[rows]``, of the orders ``words`` and ``bytes``: where a row's codes are in each word or byte.
        order: ``stream`` (code i at bit ``i * bits``, least significant first), ``high_first`` (4 bits, the first code
            in a byte's high half), ``words`` or ``bytes`` (a code in each 32-bit word or byte).

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    raw, starts = _rows(data, starts)
    out = torch.empty((len(starts), cols), dtype=torch.uint8)
    core.unpack_codes(raw, starts, shifts, out, bits, order, torch.get_num_threads())
    return out


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes as a dense stream for each row, least significant bit first, in whole words.

    Args:
        codes: uint8 ``[rows, cols]``; bits above the lowest ``bits`` are left out.
        bits: of a code, 1 to 8.

    Returns:
        int32 ``[rows, ceil(cols * bits / 32)]``.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    words = -(-codes.shape[-1] * bits // WORD_BITS)
    out = torch.empty((codes.shape[0], 4 * words), dtype=torch.uint8)
    core.pack_codes(codes.contiguous(), out, bits, torch.get_num_threads())
    return out.view(torch.int32)


def decode_codes(
    data: Tensor,
    bits: int,
    cols: int,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    table: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    group_size: int = 0,
    phase: int = 0,
    group_of: Tensor | None = None,
    starts: Tensor | None = None,
    shifts: Tensor | None = None,
    order: str = "stream",
    round_each: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``(table[code] - zero) * scale + bias`` by group of columns, computed in float32: ``[rows, cols]`` of ``dtype``.

    Args:
        data: as in :func:`unpack_codes`, and so are ``bits``, ``cols``, ``starts``, ``shifts`` and ``order``.
        bits: of a code.
        cols: codes of a row.
        scale: float32 ``[rows, groups]``, or ``[1, groups]`` for all rows; ``zero`` and ``bias`` are of the same shape.
        dtype: float32, bfloat16 or float16: what the result is rounded to.
        table: float32 ``[2^bits]``; None: a code stands for itself.
        zero: float32, or None.
        bias: float32, or None.
        group_size: columns of a group; 0: as many as there are.
        phase: columns of the first group that lie before the first column.
        group_of: int32 ``[cols]``, the group of each column, instead of ``group_size``.
        starts: where rows begin.
        shifts: where a row's codes are in each field.
        order: of the codes.
        round_each: round after every operation, as ``dtype``'s own arithmetic does, and not once at the end.
        out: ``[rows, cols]`` of ``dtype``, contiguous: where the result goes; None: into a new tensor.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    raw, starts = _rows(data, starts)
    if out is None:
        out = torch.empty((len(starts), cols), dtype=dtype)
    core.decode_codes(
        raw, starts, shifts, _f32(table), scale.float().contiguous(), _f32(zero), _f32(bias), group_of,
        group_size or max(cols, 1), phase, out, bits, order, round_each, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _rows(data: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """The bytes of ``data`` and where its rows begin in them."""
    raw = data.contiguous().view(-1).view(torch.uint8)
    if starts is None:
        starts = torch.arange(data.shape[0], dtype=torch.int64) * (raw.numel() // max(data.shape[0], 1))
    return raw, starts


def _f32(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.float().contiguous()
