"""HQQ as its layers save themselves: codes of a matrix of groups, several of its rows in one byte or word.

The weight is seen as ``[n / g, g]`` (axis 1: a group is a row) or ``[g, n / g]`` (axis 0: a column). Its rows are cut
into equal parts, and row i of every part lies in row i of ``W_q``, the first part in the highest bits. ``scale`` and
``zero`` one for each group: ``(code - zero) * scale``, both operations rounded to their dtype. Options are stored as
small tensors beside them; texts as their bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kbitq.format import element_count, matrix_shape
from kbitq.formats.base import FLOAT_DTYPES, HALVES, Catalogue, Found, Stored, StoredValues

if TYPE_CHECKING:
    from torch import Tensor


_LINE = 1 << 12  # codes that are decoded as one row


@dataclass(frozen=True)
class Packing:
    """Codes of ``bits`` bits, ``fields`` of them in an element of ``size`` bytes."""

    bits: int
    fields: int
    size: int


PACKINGS = {
    "8bit_u8": Packing(8, 1, 1), "4bit_u8": Packing(4, 2, 1), "2bit_u8": Packing(2, 4, 1), "1bit_u8": Packing(1, 8, 1),
    "3bit_32": Packing(3, 10, 4),
}  # fmt: skip
_OPTIONS = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero",
    "compute_dtype", "channel_wise", "optimize", "round_zero", "offload_meta", "encoded_state_dict",
    "stores_quant_config",
)  # fmt: skip


@dataclass(frozen=True)
class Hqq:
    """A weight whose matrix of groups has ``height`` rows of ``width`` codes; ``axis`` 1: a row is a group."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    stored: tuple[str, ...]
    packing: str
    axis: int
    height: int
    width: int

    def decode(self, values: StoredValues, first_row: int, rows: int) -> Tensor:
        import torch

        cols = matrix_shape(self.name, self.shape)[1]
        first, stop = first_row * cols, (first_row + rows) * cols
        parts = []
        for row, count, column, width in self._runs(first, stop):
            parts.append(self._run(values, row, count, column, width).view(-1))
        start = 0 if self.axis == 0 else first - first // self.width * self.width
        return torch.cat(parts)[start : start + stop - first].view(rows, cols)

    def _runs(self, first: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Codes [first, stop) as runs of one part: first row and rows, first column and columns."""
        row, last = first // self.width, -(-stop // self.width)
        if self.axis == 0:  # rows are long: as much of each as is asked for
            for at in range(row, last):
                begin = max(first - at * self.width, 0)
                yield at, 1, begin, min(stop - at * self.width, self.width) - begin
            return
        step = -(-self.height // PACKINGS[self.packing].fields)
        while row < last:  # whole groups
            end = min(last, (row // step + 1) * step)
            yield row, end - row, 0, self.width
            row = end

    def _run(self, values: StoredValues, row: int, rows: int, column: int, cols: int) -> Tensor:
        import torch

        from kbitq.ops.code_stream import decode_codes

        packing = PACKINGS[self.packing]
        step = -(-self.height // packing.fields)
        part, place = divmod(row, step)
        start, count = place * self.width + column, (rows - 1) * self.width + cols
        data = values.raw(self.stored[0], start * packing.size, count * packing.size)
        first, groups = (row, rows) if self.axis == 1 else (column, cols)
        # Codes of a run follow one another at one shift, so they may be cut into other rows: of a size for threads.
        length = rows * cols
        count = rows if self.axis == 1 else cols
        lines = next(n for n in (length // _LINE, 1) if n and count % n == 0)
        scale, zero = (values.elements(name, first, groups).view(lines, -1) for name in self.stored[1:3])
        starts = torch.arange(lines, dtype=torch.int64) * (length // lines * packing.size)
        shifts = torch.full((lines,), packing.bits * (packing.fields - 1 - part), dtype=torch.int32)
        order = "words" if packing.size == 4 else "bytes"
        return decode_codes(
            data, packing.bits, length // lines, scale, scale.dtype, zero=zero,
            group_size=self.width if self.axis == 1 else 1,
            starts=starts, shifts=shifts, order=order, round_each=True,
        )  # fmt: skip


def recognise(catalogue: Catalogue) -> Found:
    """HQQ's weights. Raises CheckpointError where their tensors do not fit each other."""
    found = Found()
    for stem, codes in catalogue.ending("W_q"):
        if not all(stem + part in catalogue.tensors for part in ("nbits", "shape", "packing")):
            continue
        found.weights.append(_weight(catalogue, stem, codes))
        named = (stem + option for option in _OPTIONS if stem + option in catalogue.tensors)
        found.dropped.update((name, f"an option of {stem}weight") for name in named)
    return found


def _weight(catalogue: Catalogue, stem: str, codes: Stored) -> Hqq:
    if stem + "scale" not in catalogue.tensors or stem + "zero" not in catalogue.tensors:
        raise catalogue.refused(f"stores {stem}W_q of HQQ with quantized scales, which are not read here")
    packing = _text(catalogue, stem + "packing")
    if packing not in PACKINGS:
        raise catalogue.broken(stem + "packing", f"HQQ's packing {packing!r} is not read here")
    shape = tuple(_numbers(catalogue, stem + "shape"))
    (axis,) = _numbers(catalogue, stem + "axis")
    scale = catalogue.want(stem + "scale", HALVES)
    count, groups = element_count(shape), element_count(scale.shape)
    zero = catalogue.want(stem + "zero", (scale.dtype,), scale.shape)
    if len(shape) < 2 or axis not in (0, 1) or not groups or count % groups or not 0 < count < 1 << 60:
        raise catalogue.broken(codes.name, f"its shape {list(shape)}, axis {axis} and {groups} scales do not fit")
    height, width = (groups, count // groups) if axis == 1 else (count // groups, groups)
    laid = PACKINGS[packing]
    if codes.nbytes != -(-height // laid.fields) * width * laid.size or (laid.size == 1 and height % laid.fields):
        raise catalogue.broken(codes.name, f"its {codes.nbytes:,} bytes are not those of a weight {list(shape)}")
    named = stem + "compute_dtype"
    if named in catalogue.tensors and FLOAT_DTYPES.get(_text(catalogue, named).removeprefix("torch.")) != scale.dtype:
        raise catalogue.broken(named, f"it is not the dtype of the scales, {scale.dtype}")
    scheme = f"HQQ, {laid.bits} bits, groups of {count // groups}"
    parts = (codes.name, scale.name, zero.name)
    return Hqq(f"{stem}weight", shape, scale.dtype, scheme, parts, packing, axis, height, width)


def _text(catalogue: Catalogue, name: str) -> str:
    catalogue.want(name, ("U8",))
    return catalogue.peek(name).decode("latin-1")


def _numbers(catalogue: Catalogue, name: str) -> list[int]:
    stored = catalogue.want(name, ("I32", "I64"))
    raw = catalogue.peek(name)
    return list(struct.unpack(f"<{element_count(stored.shape)}{'i' if stored.dtype == 'I32' else 'q'}", raw))
