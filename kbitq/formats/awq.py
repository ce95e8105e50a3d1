"""AWQ: 4-bit codes with a zero point and a scale for a group of columns, in the orders of three kernels.

GEMM packs eight rows of the weight ``[out, in]`` in a word, interleaved: ``qweight`` int32 ``[in, out / 8]``,
``qzeros`` int32 ``[groups, out / 8]``, ``scales`` ``[groups, out]``. GEMV packs along the rows: ``[out, in / 8]``,
``[out, w]`` and ``[out, 8 w]``, where the groups are padded to whole words. For both the weight is
``(code - zero) * scale``, rounded once to the dtype of the scales. The order of GEMV's quicker successor is in
awq_fast.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kbitq.formats.base import (
    HALVES,
    Catalogue,
    ForeignWeight,
    Found,
    Stored,
    StoredValues,
    groups_text,
    whole_number,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor

BITS = 4
IN_WORD = 8
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # of column c % 8 in its word
METHOD = "awq"
FAST = ("gemv_fast", "llm-awq")  # awq_fast.py
_GEMM, _GEMV = "gemm", "gemv"


@dataclass(frozen=True)
class AwqGemm(ForeignWeight):
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


@dataclass(frozen=True)
class AwqGemv(ForeignWeight):
    """A weight ``[out, in]`` whose groups have ``group`` columns."""

    group: int

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        from kbitq.ops.code_stream import decode_codes, unpack_codes

        codes, scale, points = (values.rows(name, first_row, rows) for name in self.stored)
        groups = self.shape[1] // self.group
        zero = unpack_codes(points, BITS, groups)
        return decode_codes(
            codes, BITS, self.shape[1], scale[:, :groups], scale.dtype, zero=zero, group_size=self.group, out=out
        )


def recognise(catalogue: Catalogue) -> Found:
    """AWQ's weights. Raises CheckpointError where their tensors do not fit each other."""
    layout = layout_of(catalogue)
    found = Found()
    for stem, words in catalogue.ending("qweight") if layout not in FAST else ():
        scales = catalogue.tensors.get(stem + "scales")
        zeros = catalogue.tensors.get(stem + "qzeros")
        if scales is None or zeros is None or len(words.shape) != 2 or len(scales.shape) != 2 or not words.shape[1]:
            continue
        if layout == _GEMV:
            found.weights.append(_by_rows(catalogue, stem, words, scales))
        elif IN_WORD * words.shape[1] == scales.shape[1]:
            found.weights.append(_by_columns(catalogue, stem, words, scales, layout))
    return found


def layout_of(catalogue: Catalogue) -> str:
    """The kernel whose order the config names, in lower case; ``gemm`` where it names none."""
    said = catalogue.quantization
    if said.get("backend") == "llm-awq":
        return "llm-awq"
    named = said.get("version")
    if not named and catalogue.method == METHOD:
        named = said.get("checkpoint_format") or said.get("format")
    return str(named or _GEMM).lower()


def group_of(catalogue: Catalogue, words: Stored, cols: int) -> int:
    """Columns of a group, which the config says.

    Raises CheckpointError where they do not divide ``cols``, or where codes have other than 4 bits.
    """
    bits = catalogue.quantization.get("bits", BITS)
    if bits != BITS:
        raise catalogue.refused(f"stores AWQ of {bits!r:.20} bits; only {BITS} are read here")
    said = catalogue.quantization.get("group_size", catalogue.quantization.get("q_group_size"))
    group = cols if said == -1 else whole_number(said, 1, max(cols, 1))
    if group is None or not cols or cols % group:
        raise catalogue.broken(words.name, f"its {cols} columns are not whole groups of {said!r:.20}")
    return group


def _by_columns(catalogue: Catalogue, stem: str, words: Stored, scales: Stored, layout: str) -> AwqGemm:
    catalogue.want(words.name, ("I32",))
    catalogue.want(scales.name, HALVES)
    if layout != _GEMM:
        raise catalogue.refused(
            f"stores AWQ in the layout {layout!r:.20}; those read here are {', '.join((_GEMM, _GEMV, *FAST))}"
        )
    (cols, _), (groups, rows) = words.shape, scales.shape
    catalogue.want(stem + "qzeros", ("I32",), (groups, rows // IN_WORD))
    if not groups or cols % groups:
        raise catalogue.broken(scales.name, f"its {groups} groups do not divide {cols} columns")
    scheme = f"AWQ, {BITS} bits, {groups_text(cols // groups, cols)}"
    stored = (words.name, scales.name, stem + "qzeros")
    return AwqGemm(f"{stem}weight", (rows, cols), scales.dtype, scheme, stored, groups)


def _by_rows(catalogue: Catalogue, stem: str, words: Stored, scales: Stored) -> AwqGemv:
    catalogue.want(words.name, ("I32",))
    catalogue.want(scales.name, HALVES)
    rows, cols = words.shape[0], IN_WORD * words.shape[1]
    group = group_of(catalogue, words, cols)
    zeros = catalogue.want(stem + "qzeros", ("I32",))
    if zeros.shape != (rows, zeros.shape[-1]) or scales.shape != (rows, IN_WORD * zeros.shape[-1]):
        raise catalogue.broken(zeros.name, f"its shape {list(zeros.shape)} and that of {scales.name} do not fit")
    if scales.shape[1] < cols // group:
        raise catalogue.broken(scales.name, f"it has no scale for each of the {cols // group} groups of a row")
    scheme = f"AWQ, {BITS} bits, {groups_text(group, cols)}"
    return AwqGemv(f"{stem}weight", (rows, cols), scales.dtype, scheme, (words.name, scales.name, zeros.name), group)
