"""AWQ in its GEMM order: 4-bit codes packed along the rows of ``[in, out]``, eight columns in a word, interleaved.

``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]``, ``scales`` ``[groups, out]``. The weight
``[out, in]`` is ``(code - zero) * scale``, rounded once to the dtype of the scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kbitq.formats.base import HALVES, Catalogue, ForeignWeight, Found, Stored, StoredValues, groups_text

if TYPE_CHECKING:
    from torch import Tensor

BITS = 4
IN_WORD = 8
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # of column c % 8 in its word


@dataclass(frozen=True)
class Awq(ForeignWeight):
    """A weight ``[out, in]``, with ``groups`` groups of columns."""

    groups: int

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        import torch

        from kbitq.ops.code_stream import decode_codes, unpack_codes

        words, scales, zeros = self.stored
        first, stop = first_row // IN_WORD, -(-(first_row + rows) // IN_WORD)
        codes = values.columns(words, first, stop - first).t().contiguous()
        points = values.columns(zeros, first, stop - first).t().contiguous()
        scale = values.columns(scales, first_row, rows).t()
        row = torch.arange(first_row, first_row + rows)
        word, shifts = row // IN_WORD - first, BITS * torch.tensor(PLACE, dtype=torch.int32)[row % IN_WORD]
        zero = unpack_codes(points, BITS, self.groups, starts=word * (4 * self.groups), shifts=shifts, order="words")
        return decode_codes(
            codes, BITS, self.shape[1], scale, scale.dtype, zero=zero, group_size=-(-self.shape[1] // self.groups),
            starts=word * (4 * self.shape[1]), shifts=shifts, order="words", out=out,
        )  # fmt: skip


def recognise(catalogue: Catalogue) -> Found:
    """AWQ's weights. Raises CheckpointError where their tensors do not fit each other."""
    found = Found()
    for stem, words in catalogue.ending("qweight"):
        scales = catalogue.tensors.get(stem + "scales")
        if scales is None or stem + "qzeros" not in catalogue.tensors or len(words.shape) != 2:
            continue
        if len(scales.shape) == 2 and IN_WORD * words.shape[1] == scales.shape[1] and words.shape[1]:
            found.weights.append(_weight(catalogue, stem, words, scales))
    return found


def _weight(catalogue: Catalogue, stem: str, words: Stored, scales: Stored) -> Awq:
    catalogue.want(words.name, ("I32",))
    catalogue.want(scales.name, HALVES)
    said = str(catalogue.quantization.get("version") or "gemm").lower()
    if said != "gemm":
        raise catalogue.refused(f"stores AWQ in the layout {said!r}; only gemm is read here")
    (cols, _), (groups, rows) = words.shape, scales.shape
    catalogue.want(stem + "qzeros", ("I32",), (groups, rows // IN_WORD))
    if not groups or cols % groups:
        raise catalogue.broken(scales.name, f"its {groups} groups do not divide {cols} columns")
    scheme = f"AWQ, {BITS} bits, {groups_text(cols // groups, cols)}"
    stored = (words.name, scales.name, stem + "qzeros")
    return Awq(f"{stem}weight", (rows, cols), scales.dtype, scheme, stored, groups)
