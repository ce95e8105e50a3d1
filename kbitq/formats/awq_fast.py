"""AWQ in the order of its quick GEMV kernel, as AutoAWQ (``gemv_fast``) and llm-awq store it.

``qweight`` int16 ``[out / 4, in]``, four codes in an element, the first lowest: of each 64 elements in a row, 16 are 64
columns of the first of four rows, 16 those of the second, and so on. Of each 32 columns, pairs are dealt out in turn to
four runs of eight, and in a run the even columns come before the odd ones. ``scales`` and zero
points ``[w, out]``, the groups padded; a zero point is stored multiplied by its scale and negated, as ``qzeros`` or
``scaled_zeros``. The weight is ``code * scale + zero``, rounded once to the dtype of the scales, as the kernel's fused
operation rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kbitq.formats.awq import BITS, FAST, group_of, layout_of
from kbitq.formats.base import HALVES, Catalogue, ForeignWeight, Found, Stored, StoredValues, groups_text

if TYPE_CHECKING:
    from torch import Tensor

_TOGETHER = 4  # rows
_RUN = 64  # columns of a row that lie together


@dataclass(frozen=True)
class AwqFast(ForeignWeight):
    """A weight ``[out, in]`` whose groups have ``group`` columns."""

    group: int

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        from kbitq.ops.code_stream import decode_codes

        words, scales, zeros = self.stored
        groups = self.shape[1] // self.group
        scale, zero = (values.columns(name, first_row, rows)[:groups].t() for name in (scales, zeros))
        first, stop = first_row // _TOGETHER, -(-(first_row + rows) // _TOGETHER)
        codes = _rows(values.rows(words, first, stop - first))[first_row - first * _TOGETHER :][:rows]
        return decode_codes(codes, 8, self.shape[1], scale, scale.dtype, bias=zero, group_size=self.group, out=out)


def _rows(words: Tensor) -> Tensor:
    """The codes of four rows from each row of int16 ``words`` ``[n, cols]``: uint8 ``[4 n, cols]``."""
    from kbitq.ops.code_stream import unpack_codes

    count, cols = words.shape
    apart = words.view(count, cols // _RUN, _TOGETHER, _RUN // _TOGETHER).transpose(1, 2)
    codes = unpack_codes(apart.reshape(_TOGETHER * count, cols // _TOGETHER), BITS, cols)
    # A column of 32 is 8 pair + 2 run + odd, and lies at 8 run + 4 odd + pair.
    return codes.view(-1, 4, 2, 4).permute(0, 3, 1, 2).reshape(_TOGETHER * count, cols)


def recognise(catalogue: Catalogue) -> Found:
    """Weights in this order. Raises CheckpointError where their tensors do not fit each other."""
    found = Found()
    if layout_of(catalogue) not in FAST:
        return found
    for stem, words in catalogue.ending("qweight"):
        scales = catalogue.tensors.get(stem + "scales")
        named = next((stem + n for n in ("qzeros", "scaled_zeros") if stem + n in catalogue.tensors), None)
        if scales is not None and named is not None and len(words.shape) == 2:
            found.weights.append(_weight(catalogue, stem, words, scales, named))
    return found


def _weight(catalogue: Catalogue, stem: str, words: Stored, scales: Stored, zeros: str) -> AwqFast:
    catalogue.want(words.name, ("I16",))
    catalogue.want(scales.name, HALVES)
    rows, cols = _TOGETHER * words.shape[0], words.shape[1]
    group = group_of(catalogue, words, cols)
    if cols % _RUN:
        raise catalogue.broken(words.name, f"its {cols} columns are not whole runs of {_RUN}")
    if len(scales.shape) != 2 or scales.shape[1] != rows or scales.shape[0] < cols // group:
        raise catalogue.broken(scales.name, f"its shape {list(scales.shape)} should be [{cols // group}, {rows}]")
    catalogue.want(zeros, (scales.dtype,), scales.shape)
    scheme = f"AWQ, {BITS} bits, {groups_text(group, cols)}"
    return AwqFast(f"{stem}weight", (rows, cols), scales.dtype, scheme, (words.name, scales.name, zeros), group)
