"""The codec ``planes``: one index of K bits a weight, stored as bit planes, and one E4M4 scale byte a block of 32.

     element  31 30 29  ...   1  0                                          codebook[index] * decode(scale byte)
     word 0  [ .  .  .  ...   .  . ]  bit 0 of every index of the block
     ...
     word K-1[ .  .  .  ...   .  . ]  bit K-1

docs/format.md sections 1 to 3. The operators are in ``kbitq.ops``; they are imported when values are first touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kbitq import format as fmt
from kbitq.codecs import codebooks
from kbitq.codecs.base import Part, Request, SpanLike
from kbitq.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from kbitq.ops.tiles import Tiles

PACKED, ABSMAX, CODEBOOK = (suffix.removeprefix("_") for suffix in fmt.COMPANION_SUFFIXES)
ZERO_BYTE, LARGEST_BYTE = 0x00, 0xFF  # of a scale


class Planes:
    """See the module; its methods do what :class:`kbitq.codecs.base.Codec` says."""

    name = fmt.DEFAULT_CODEC
    ks = tuple(range(fmt.K_MIN, fmt.K_MAX + 1))
    cut = fmt.BLOCK
    extra_bits = 0  # of an index, that are not stored

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        return (
            Part(PACKED, "I32", fmt.packed_shape(name, shape, k)),
            Part(ABSMAX, "U8", fmt.absmax_shape(name, shape)),
            Part(CODEBOOK, "F32", (1 << k,), constant=True),
        )

    def levels(self, spec: Any, k: int) -> tuple[npt.NDArray[np.float32] | None, str]:
        return codebooks.levels(spec, k)

    def normal_levels(self, k: int) -> npt.NDArray[np.float32]:
        """``optimal``."""
        return codebooks.optimal(k)

    def encode(self, w: Tensor, request: Request) -> dict[str, Tensor]:
        from kbitq import ops

        asked = request.to(w.device)
        assert asked.levels is not None
        made = ops.quantize(
            w, asked.levels, amax=asked.amax, importance=asked.importance, scale=asked.scale, codec=self.name
        )
        return dict(zip((PACKED, ABSMAX, CODEBOOK), made, strict=True))

    def encode_into(self, w: Tensor, request: Request, parts: Mapping[str, Tensor]) -> None:
        from kbitq import ops

        assert request.levels is not None
        ops.quantize_into(
            w, request.levels, parts[PACKED], parts[ABSMAX], parts[CODEBOOK],
            amax=request.amax, importance=request.importance, scale=request.scale, codec=self.name,
        )  # fmt: skip

    def decode(self, parts: Mapping[str, Tensor], cols: int, dtype: dtype, out: Tensor | None = None) -> Tensor:
        from kbitq import ops

        return ops.dequantize(parts[PACKED], parts[ABSMAX], parts[CODEBOOK], cols, dtype, out, self.name)

    def stats(self, w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        from kbitq import ops

        return ops.stats(w, parts[PACKED], parts[ABSMAX], parts[CODEBOOK], self.name)

    def indices(self, parts: Mapping[str, Tensor], cols: int) -> Tensor:
        """Which level each element has, int64 ``[rows, cols]``: what is decoded if scales are 1 and levels 0, 1, ..."""
        import torch

        scales = torch.full_like(parts[ABSMAX], fmt.E4M4_ONE)
        return self._counted(parts[PACKED], scales, parts[CODEBOOK].numel(), cols).to(torch.int64)

    def indices_of(self, words: Tensor, cols: int) -> Tensor:
        """The same of planes alone, int32 ``[rows, K]`` of one block: float32 ``[rows, cols]``."""
        import torch

        scales = torch.full((len(words), 1), fmt.E4M4_ONE, dtype=torch.uint8, device=words.device)
        return self._counted(words, scales, 1 << words.shape[1], cols)

    def _counted(self, words: Tensor, scales: Tensor, count: int, cols: int) -> Tensor:
        import torch

        counting = torch.arange(count, dtype=torch.float32, device=words.device)
        return self.decode({PACKED: words, ABSMAX: scales, CODEBOOK: counting}, cols, torch.float32)

    def block_stats(self, w: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        return self.stats(w, parts)  # a piece of a cut row is a block

    def place(self, span: SpanLike, k: int) -> dict[str, int]:
        return {PACKED: span.first_block * k * fmt.WORD_BYTES, ABSMAX: span.first_block}

    def k_of(self, name: str, shapes: Mapping[str, Sequence[int]]) -> int:
        return fmt.k_of_codebook(name, shapes[CODEBOOK], self.ks, self.extra_bits)

    def shape_of(self, name: str, k: int, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        packed = shapes[PACKED]
        if not packed or packed[-1] % k:
            raise FormatError(f"its packed shape {list(packed)} does not fit K = {k}")
        return fmt.shape_of_packed(name, k, packed)

    def check(self, parts: Mapping[str, Tensor], where: str) -> None:
        import torch

        if not bool(torch.isfinite(parts[CODEBOOK]).all()):
            raise FormatError(f"{where} has a level that is not finite")

    def problems(self, parts: Mapping[str, Tensor]) -> list[str]:
        levels = parts[CODEBOOK]
        found = ["its levels do not ascend"] if bool((levels[1:] < levels[:-1]).any()) else []
        return found if bool(levels.any()) else [*found, "all levels of its codebook are 0"]

    def levels_of(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The stored codebook without its power of two: the largest magnitude of normalised levels is 1."""
        codebook = parts[CODEBOOK]
        return codebook / codebook.abs().max()

    def scale_counts(self, part: str, data: Tensor) -> tuple[int, int, int] | None:
        if part != ABSMAX:
            return None
        return data.numel(), int((data == ZERO_BYTE).sum()), int((data == LARGEST_BYTE).sum())

    def linear(self, x: Tensor, parts: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        from kbitq.ops import linear

        return linear.linear(x, parts[PACKED], parts[ABSMAX], parts[CODEBOOK], bias, self.name)

    def tiles(self, parts: Mapping[str, Tensor], cols: int) -> Tiles | None:
        from kbitq.ops import tiled_linear

        return tiled_linear.tiles_where_able(parts[PACKED], parts[ABSMAX], parts[CODEBOOK], cols, self.name)

    def tiles_made(self, parts: Mapping[str, Tensor]) -> Tiles | None:
        from kbitq.ops import tiled_linear

        return tiled_linear.tiles_made(parts[PACKED], parts[ABSMAX], parts[CODEBOOK])


PLANES = Planes()
CODECS = {PLANES.name: PLANES}
