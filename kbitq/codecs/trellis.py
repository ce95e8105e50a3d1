"""The codec ``trellis``: an index of K + 2 bits a weight, of which K are stored, and a scale for 32 or 128 columns.

     element  31 30 29  ...   1  0                                          codebook[index] * decode(scale byte)
     word 0  [ .  .  .  ...   .  . ]  the path: bit 0 of every index; rotations of it give bits 1 and 2
     word 1  [ .  .  .  ...   .  . ]  bit 3
     ...
     word K-1[ .  .  .  ...   .  . ]  bit K + 1

docs/format.md, "The codec trellis". As ``trellis`` a scale is for 32 columns (K + 0.25 bits a weight), as
``trellis/128`` for 128 (K + 0.0625). The parts are those of ``planes`` in other sizes, and so is most of what is said
of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kbitq import format as fmt
from kbitq.codecs import codebooks
from kbitq.codecs.base import Part, Request, SpanLike
from kbitq.codecs.planes import ABSMAX, CODEBOOK, PACKED, Planes
from kbitq.errors import CodebookError

if TYPE_CHECKING:
    from torch import Tensor


class Trellis(Planes):
    """See the module; its methods do what :class:`kbitq.codecs.base.Codec` says."""

    ks = tuple(range(fmt.TRELLIS_K_MIN, fmt.TRELLIS_K_MAX + 1))
    extra_bits = fmt.TRELLIS_EXTRA_BITS

    def __init__(self, name: str, scale_block: int) -> None:
        self.name = name
        self.cut = scale_block

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        return (
            Part(PACKED, "I32", fmt.packed_shape(name, shape, k)),
            Part(ABSMAX, "U8", fmt.absmax_shape(name, shape, self.cut)),
            Part(CODEBOOK, "F32", (1 << (k + self.extra_bits),), constant=True),
        )

    def levels(self, spec: Any, k: int) -> tuple[npt.NDArray[np.float32] | None, str]:
        if k not in self.ks:
            raise CodebookError(f"K must be {self.ks[0]}..{self.ks[-1]}, not {k}")
        if isinstance(spec, str) and spec == "optimal":
            return codebooks.optimal_trellis(k, self.cut), spec
        return codebooks.levels(spec, k + self.extra_bits)

    def normal_levels(self, k: int) -> npt.NDArray[np.float32]:
        return codebooks.optimal_trellis(k, self.cut)

    def encode_block(self, w: Tensor, request: Request, scales: Tensor) -> dict[str, Tensor]:
        """The parts, as of ``trellis``, of blocks ``[rows, n]``, n <= 32, whose scale bytes ``[rows, 1]`` are known."""
        import torch

        from kbitq import ops

        assert request.levels is not None
        packed = torch.empty((len(w), request.k), dtype=torch.int32, device=w.device)
        made = {PACKED: packed, ABSMAX: scales.clone(), CODEBOOK: torch.empty_like(request.levels)}
        ops.quantize_into(
            w, request.levels, made[PACKED], made[ABSMAX], made[CODEBOOK],
            amax=request.amax, importance=request.importance, scale="given", codec=TRELLIS.name,
        )  # fmt: skip
        return made

    def block_stats(self, w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        import torch

        blocks = parts[PACKED].reshape(len(w), fmt.block_count(w.shape[1]), -1)
        scales = parts[ABSMAX].repeat_interleave(self.cut // fmt.BLOCK, 1)[:, : blocks.shape[1]]
        whole, tables = w.shape[1] // fmt.BLOCK, []
        for of_blocks, length in ((slice(0, whole), fmt.BLOCK), (slice(whole, None), w.shape[1] % fmt.BLOCK)):
            packed = blocks[:, of_blocks].reshape(-1, blocks.shape[2])
            if len(packed):
                values = w[:, of_blocks.start * fmt.BLOCK :][:, : length * len(packed) // len(w)]
                one = {PACKED: packed, ABSMAX: scales[:, of_blocks].reshape(-1, 1), CODEBOOK: parts[CODEBOOK]}
                tables.append(TRELLIS.stats(values.reshape(-1, length), one).reshape(len(w), -1, 3))
        return torch.cat(tables, 1).reshape(-1, 3)

    def place(self, span: SpanLike, k: int) -> dict[str, int]:
        row, column = divmod(span.first_element, span.row_length)
        scale = row * -(-span.row_length // self.cut) + column // self.cut
        return {PACKED: span.first_block * k * fmt.WORD_BYTES, ABSMAX: scale}


TRELLIS = Trellis("trellis", fmt.BLOCK)
CODECS = {codec.name: codec for codec in (TRELLIS, *(Trellis(f"trellis/{c}", c) for c in fmt.SCALE_BLOCKS[1:]))}
