"""Tile order: the words of a file, moved to where the fused kernels of a GPU want them (csrc/format/tile_order.h).

Planes, as a file holds them, are repacked to tiles once; :meth:`Tiles.planes` gives them back bit for bit. Of the
codec ``planes`` K = 2..5 has tiles, of ``trellis`` and ``trellis/128`` K = 1..4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kbitq import format as fmt
from kbitq._core import core
from kbitq.ops import codec
from kbitq.ops.workspace import workspace

_BITS_OF_WORDS = {
    name: {core.tile_shape(1, 1, k, name)[2]: k for k in layout.ks if k <= core.tile_max_bits}
    for name, layout in codec.LAYOUTS.items()
}
"""For each codec, K by the words of a record."""


def has_tiles(k: int, coding: str) -> bool:
    """Whether a codec of the core has a tile order at this K."""
    codec.layout_of(coding)
    return k in _BITS_OF_WORDS[coding].values()


@dataclass(frozen=True)
class Tiles:
    """A quantized matrix in tile order, on a GPU. Do not write to its tensors: kernels may read them ahead of time.

    Attributes:
        data: int32 ``[ceil(rows / 16), ceil(cols / 256), 128 K + 32]``; ``128 K + 8`` of ``trellis/128``.
        codebook: float32 ``[G, levels]``, a copy of its own; one for each of G equal groups of rows.
        rows: of the matrix.
        cols: of the matrix.
        codec: how it is coded.
    """

    data: Tensor
    codebook: Tensor
    rows: int
    cols: int
    codec: str = fmt.DEFAULT_CODEC

    @property
    def k(self) -> int:
        """Words of a block."""
        return codec.bits_of(self.codebook, codec=self.codec)

    @property
    def levels(self) -> Tensor:
        """The codebooks, by the name that holds for any codec."""
        return self.codebook

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles and the codebooks."""
        return self.data.nbytes + self.codebook.nbytes

    def rows_of(self, begin: int, end: int) -> Tiles:
        """Rows ``[begin, end)`` as a matrix that shares the memory: whole tiles, and whole groups if several."""
        size = self.rows // self.codebook.shape[0]
        books = self.codebook if self.codebook.shape[0] == 1 else self.codebook[begin // size : end // size]
        part = self.data[begin // core.tile_rows : -(-end // core.tile_rows)]
        return Tiles(part, books, end - begin, self.cols, self.codec)

    def planes(self) -> tuple[Tensor, Tensor]:
        """``(packed, absmax)`` as they were before :func:`tile`, bit for bit."""
        return untiled(self.data, self.rows, self.cols, self.codec)


# --- repacking -------------------------------------------------------------------------------------


TILE_COLS = 256
"""Columns of a record."""


def _tiled_bits(packed: Tensor, absmax: Tensor, cols: int, coding: str) -> int:
    """K of planes to be tiled. Raises ValueError, which names the argument, where shapes and ``cols`` do not fit."""
    codec.check_dims("packed", packed, 2)
    codec.check_size("cols", cols, codec.cols_limit(absmax, coding))
    k, rest = divmod(packed.shape[1], max(fmt.block_count(cols), 1))
    if isinstance(k, int) and (rest or not has_tiles(k, coding)):
        most = max(_BITS_OF_WORDS[coding].values())
        raise ValueError(
            f"packed: its {packed.shape[1]} words a row are not those of {cols} columns at a K up to {most}"
        )
    return k


def _tile(packed: Tensor, absmax: Tensor, cols: int, coding: str = fmt.DEFAULT_CODEC) -> Tensor:
    k = _tiled_bits(packed, absmax, cols, coding)
    tiles = packed.new_empty(core.tile_shape(packed.shape[0], cols, k, coding))
    threads, stream = torch.get_num_threads(), codec.stream_of(packed)
    core.repack(packed, absmax, tiles, cols, False, threads, stream, coding)
    return tiles


def _fake_tile(packed: Tensor, absmax: Tensor, cols: int, coding: str = fmt.DEFAULT_CODEC) -> Tensor:
    k = _tiled_bits(packed, absmax, cols, coding)
    return packed.new_empty(core.tile_shape(packed.shape[0], cols, k, coding))


def _untiled_bits(tiles: Tensor, rows: int, cols: int, coding: str) -> int:
    """K of tiles. Raises ValueError, which names the argument, where they are not those of a matrix of that size."""
    codec.check_dims("tiles", tiles, 3)
    codec.check_size("rows", rows, tiles.shape[0] * core.tile_rows)
    codec.check_size("cols", cols, tiles.shape[1] * TILE_COLS)
    codec.layout_of(coding)
    known = _BITS_OF_WORDS[coding]
    if tiles.shape[2] not in known:
        raise ValueError(f"tiles: records of {tiles.shape[2]} words are of no K")
    return known[tiles.shape[2]]


def _untiled(tiles: Tensor, rows: int, cols: int, coding: str = fmt.DEFAULT_CODEC) -> tuple[Tensor, Tensor]:
    """packed and absmax of such a matrix, not filled."""
    bits, scales = _untiled_bits(tiles, rows, cols, coding), codec.layout_of(coding).scales(cols)
    packed = tiles.new_empty((rows, fmt.block_count(cols) * bits))
    return packed, tiles.new_empty((rows, scales), dtype=torch.uint8)


def _untile(tiles: Tensor, rows: int, cols: int, coding: str = fmt.DEFAULT_CODEC) -> tuple[Tensor, Tensor]:
    packed, absmax = _untiled(tiles, rows, cols, coding)
    threads, stream = torch.get_num_threads(), codec.stream_of(tiles)
    core.repack(packed, absmax, tiles, cols, True, threads, stream, coding)
    return packed, absmax


codec.register('tile(Tensor packed, Tensor absmax, SymInt cols, str codec="planes") -> Tensor', _tile, _fake_tile)
codec.register(
    'untile(Tensor tiles, SymInt rows, SymInt cols, str codec="planes") -> (Tensor, Tensor)', _untile, _untiled
)


def untiled(tiles: Tensor, rows: int, cols: int, coding: str = fmt.DEFAULT_CODEC) -> tuple[Tensor, Tensor]:
    """``(packed, absmax)`` of tiles ``[rows, cols]``: the inverse of :func:`tile`.

    Raises:
        ValueError: the tiles are not those of a matrix of this size and codec.
    """
    return torch.ops.kbitq.untile(tiles, rows, cols, coding)


def tile(packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, coding: str = fmt.DEFAULT_CODEC) -> Tiles:
    """Repack a quantized matrix; a few milliseconds on a GPU.

    Args:
        packed: int32 ``[rows, nblk * K]``; ``[E, a, nblk * K]`` for a stack, seen as ``E * a`` rows.
        absmax: uint8 ``[rows, nblk]``, or ``[E, a, nblk]``; of ``trellis/128`` a quarter as wide.
        codebook: float32 ``[levels]``, or ``[G, levels]`` with any leading dimensions for G. Of a stack with one, every
            matrix gets a copy.
        cols: elements in a row.
        coding: how the matrix is coded: ``planes``, ``trellis`` or ``trellis/128``.

    Raises:
        ValueError: an argument's type, shape or device does not fit, or this codec has no tiles at this K.
    """
    books = codebook.detach().reshape(-1, codebook.shape[-1])
    books = books.repeat(packed.shape[0] if packed.dim() == 3 and books.shape[0] == 1 else 1, 1)
    if packed.is_cuda:
        workspace(packed.device, capturing=True)  # made here, because it cannot be made while a graph is captured
    words, scales = packed.detach().flatten(0, -2).contiguous(), absmax.detach().flatten(0, -2).contiguous()
    data = torch.ops.kbitq.tile(words, scales, cols, coding)
    return Tiles(_frozen(data), _frozen(books), words.shape[0], cols, coding)


def _frozen(tensor: Tensor) -> Tensor:
    """A parameter, because compilers and graphs take those for what stays where it is."""
    return torch.nn.Parameter(tensor, requires_grad=False)
