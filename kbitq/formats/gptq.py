"""GPTQ: codes packed down the rows of ``[in, out]``, a zero point and a scale for each group of rows and column.

``qweight`` int32 ``[in * b / 32, out]``: a dense stream down each column. ``qzeros`` int32 ``[groups, out * b / 32]``:
a stream along each row, less one in version 1. ``scales`` ``[groups, out]``, ``g_idx`` int32 ``[in]``: the group of
each row. The weight ``[out, in]`` is ``(code - zero) * scale``, rounded once to the dtype of the scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kbitq.formats.awq import METHOD as AWQ
from kbitq.formats.base import HALVES, Catalogue, ForeignWeight, Found, Stored, StoredValues, groups_text

if TYPE_CHECKING:
    from torch import Tensor

BITS = (2, 3, 4, 8)
_ALIGN = 32  # columns of zero points that fill whole words, whatever the bits
_VERSIONS = {"": 1, "gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True)
class Gptq(ForeignWeight):
    """A weight ``[out, in]`` of ``bits`` bits. ``version`` 1 stores zero points less one."""

    bits: int
    groups: int
    version: int

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        from kbitq.formats import affine

        stem = self.name.removesuffix("weight")
        codes = values.columns(stem + "qweight", first_row, rows).t().contiguous()
        scale = values.columns(stem + "scales", first_row, rows)
        zero = self._zeros(values, stem + "qzeros", first_row, rows)
        groups = affine.Groups.given(values, self.stored[3:], self.groups, self.shape[1])
        return affine.decode(codes, self.bits, self.shape[1], scale.t(), zero.t(), groups, out)

    def _zeros(self, values: StoredValues, name: str, first: int, count: int) -> Tensor:
        """Zero points of some columns, uint8 ``[groups, count]``."""
        from kbitq.formats import affine

        start = first // _ALIGN * _ALIGN
        stop = min(-(-(first + count) // _ALIGN) * _ALIGN, self.shape[0])
        words = values.columns(name, start * self.bits // 32, (stop - start) * self.bits // 32)
        return affine.gptq_zeros(words, self.bits, stop - start, self.version)[:, first - start : first - start + count]


def recognise(catalogue: Catalogue) -> Found:
    """GPTQ's weights. Raises CheckpointError where their tensors do not fit each other."""
    found = Found()
    if catalogue.method == AWQ:  # whose orders by rows have these names too, and sometimes these shapes
        return found
    for stem, words in catalogue.ending("qweight"):
        scales = catalogue.tensors.get(stem + "scales")
        if (
            scales is None
            or stem + "qzeros" not in catalogue.tensors
            or len(words.shape) != 2
            or words.shape[-1:] != scales.shape[-1:]
        ):
            continue
        found.weights.append(_weight(catalogue, stem, words, scales))
    return found


def _weight(catalogue: Catalogue, stem: str, words: Stored, scales: Stored) -> Gptq:
    catalogue.want(words.name, ("I32",))
    catalogue.want(scales.name, HALVES)
    if len(scales.shape) != 2 or not scales.shape[0]:
        raise catalogue.broken(scales.name, f"its shape {list(scales.shape)} is not [groups, out]")
    groups, out = scales.shape
    zeros = catalogue.want(stem + "qzeros", ("I32",))
    index = catalogue.tensors.get(stem + "g_idx")
    bits = _bits(catalogue, words, zeros, out)
    cols = words.shape[0] * 32 // bits
    catalogue.want(zeros.name, ("I32",), (groups, out * bits // 32))
    if out * bits % 32 or words.shape[0] * 32 % bits:
        raise catalogue.broken(words.name, f"its shape {list(words.shape)} does not fit {bits} bits")
    parts = [words.name, scales.name, zeros.name]
    if index is not None and index.shape != (0,):
        catalogue.want(index.name, ("I32",), (cols,))
        parts.append(index.name)
    if not 0 < groups <= max(cols, 1):
        raise catalogue.broken(scales.name, f"it has {groups} groups for {cols} columns")
    scheme = f"GPTQ, {bits} bits, {groups_text(-(-cols // groups), cols)}"
    version = _version(catalogue)
    return Gptq(f"{stem}weight", (out, cols), scales.dtype, scheme, tuple(parts), bits, groups, version)


def _bits(catalogue: Catalogue, words: Stored, zeros: Stored, out: int) -> int:
    """Bits of a code, which the width of the zero points says."""
    bits, rest = divmod(32 * zeros.shape[-1], out) if zeros.shape and out else (0, 0)
    if rest or bits not in BITS:
        allowed = ", ".join(map(str, BITS))
        raise catalogue.broken(words.name, f"GPTQ with {bits} bits is not read here, only with {allowed}")
    return bits


def _version(catalogue: Catalogue) -> int:
    quantization = catalogue.quantization
    said = str(quantization.get("checkpoint_format") or quantization.get("format") or "").lower()
    if said not in _VERSIONS:
        raise catalogue.refused(f"stores GPTQ in the layout {said!r}, which is not read here")
    return _VERSIONS[said]
