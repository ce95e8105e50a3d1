"""MXFP4 as gpt-oss stores its experts: ``N_blocks`` uint8 ``[E, out, in / 32, 16]``, ``N_scales`` uint8 without the 16.

Codes are E2M1, the low half of a byte first; a scale byte b is 2^(b - 127). The weight N is ``[E, in, out]``, turned
round as transformers has it, in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kbitq.formats.base import Catalogue, ForeignWeight, Found, StoredValues

if TYPE_CHECKING:
    from torch import Tensor

_GROUP, _GROUP_BYTES = 32, 16
_READ_BYTES = 8 << 20  # of an expert's codes at a time


@dataclass(frozen=True)
class Mxfp4Experts(ForeignWeight):
    """A stack of experts' matrices."""

    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        import torch

        _, cols, width = self.shape
        decoded = torch.empty((rows, width), dtype=torch.bfloat16) if out is None else out
        done = 0
        while done < rows:
            expert, first = divmod(first_row + done, cols)
            count = min(rows - done, cols - first)
            self._columns(values, expert, first, decoded[done : done + count])
            done += count
        return decoded

    def _columns(self, values: StoredValues, expert: int, first: int, target: Tensor) -> None:
        """Columns of an expert's stored matrix, from ``first`` on, as the rows of ``target``."""
        import torch

        from kbitq.formats.tables import exponents, table
        from kbitq.ops.code_stream import decode_codes

        _, cols, out = self.shape
        groups, count = cols // _GROUP, target.shape[0]
        begin, end = first // _GROUP, -(-(first + count) // _GROUP)
        at = first - begin * _GROUP
        step = max(1, _READ_BYTES // (groups * _GROUP_BYTES))
        for row in range(0, out, step):
            height = min(step, out - row)
            start = (expert * out + row) * groups
            codes = values.elements(self.stored[0], start * _GROUP_BYTES, height * groups * _GROUP_BYTES)
            scales = values.elements(self.stored[1], start, height * groups).view(height, groups)
            part = codes.view(height, groups, _GROUP_BYTES)[:, begin:end].reshape(height, -1)
            width = (end - begin) * _GROUP
            scale = exponents(scales[:, begin:end])
            decoded = decode_codes(
                part.contiguous(), 4, width, scale, torch.bfloat16, table=table("e2m1"), group_size=_GROUP
            )
            target[:, row : row + height] = decoded[:, at : at + count].t()


def recognise(catalogue: Catalogue) -> Found:
    """Experts of gpt-oss in MXFP4. Raises CheckpointError where their tensors do not fit each other."""
    found = Found()
    for name, blocks in catalogue.ending("_blocks"):
        scales = catalogue.tensors.get(name + "_scales")
        if scales is None or blocks.dtype != "U8" or len(blocks.shape) != 4:
            continue
        if blocks.shape[3] != _GROUP_BYTES:
            raise catalogue.broken(blocks.name, f"its shape {list(blocks.shape)} is not [E, out, in / 32, 16]")
        catalogue.want(scales.name, ("U8",), blocks.shape[:3])
        experts, out, groups, _ = blocks.shape
        shape, stored = (experts, groups * _GROUP, out), (blocks.name, scales.name)
        found.weights.append(Mxfp4Experts(name, shape, "BF16", "MXFP4", stored))
    return found
