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
from kbitq.formats.base import FLOAT_DTYPES, HALVES, Catalogue, ForeignWeight, Found, Stored, StoredValues

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
class Hqq(ForeignWeight):
    """A weight whose matrix of groups has ``height`` rows of ``width`` codes; ``axis`` 1: a row is a group."""

    packing: str
    axis: int
    height: int
    width: int

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        import torch

        from kbitq.ops.dtypes import TORCH_DTYPES

        cols = matrix_shape(self.name, self.shape)[1]
        first, stop = first_row * cols, (first_row + rows) * cols
        start = 0 if self.axis == 0 else first % self.width  # groups along the rows are decoded whole
        runs = list(self._runs(first, stop))
        count = sum(height * width for _, height, _, width in runs)
        flat = out.view(-1) if out is not None and count == stop - first else None
        place = torch.empty(count, dtype=TORCH_DTYPES[self.dtype]) if flat is None else flat
        done = 0
        for row, height, column, width in runs:
            self._run(values, row, height, column, width, place[done : done + height * width])
            done += height * width
        return out if out is not None and flat is not None else place[start : start + stop - first].view(rows, cols)

    def _runs(self, first: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Codes [first, stop) as runs of one part: first row and rows, first column and columns."""
        row, last = first // self.width, -(-stop // self.width)
        step = -(-self.height // PACKINGS[self.packing].fields)
        while row < last:
            end = min(last, (row // step + 1) * step)
            if self.axis == 0:  # rows are long: as much of the first and the last as is asked for
                if row * self.width < first:
                    end = row + 1
                elif end * self.width > stop:
                    end = max(end - 1, row + 1)
                begin = max(first - row * self.width, 0)
                yield row, end - row, begin, min(stop - row * self.width, self.width) - begin
            else:
                yield row, end - row, 0, self.width
            row = end

    def _run(self, values: StoredValues, row: int, rows: int, column: int, cols: int, place: Tensor) -> None:
        """Fill ``place`` with a run's values, an element each."""
        import torch

        from kbitq.ops.code_stream import decode_codes

        packing = PACKINGS[self.packing]
        part, within = divmod(row, -(-self.height // packing.fields))
        start, count = within * self.width + column, (rows - 1) * self.width + cols
        data = values.raw(self.stored[0], start * packing.size, count * packing.size)
        first, groups = (row, rows) if self.axis == 1 else (column, cols)
        scale, zero = (values.elements(name, first, groups) for name in self.stored[1:3])
        if self.axis == 1:
            # Codes of a run follow one another at one shift, so they may be cut into other rows: of a size for threads.
            lines = next(n for n in (rows * cols // _LINE, 1) if n and rows % n == 0)
            size, starts = self.width, torch.arange(lines, dtype=torch.int64) * (rows * cols // lines)
        else:
            lines, size, starts = rows, 1, torch.arange(rows, dtype=torch.int64) * self.width
        shape = (lines if self.axis == 1 else 1, -1)
        decode_codes(
            data, packing.bits, rows * cols // lines, scale.view(shape), scale.dtype, zero=zero.view(shape),
            group_size=size, starts=starts * packing.size,
            shifts=torch.full((lines,), packing.bits * (packing.fields - 1 - part), dtype=torch.int32),
            order="words" if packing.size == 4 else "bytes", round_each=True, out=place.view(lines, -1),
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
