"""Products with the pieces of a layer's weight, lookups in them, and what a layer holds for these.

On a GPU a piece is held in tile order, and only so; elsewhere, and where there are no tiles for it, as its file has it.
Everything that runs in a forward is an operator with a fake kernel (``torch.ops.kbitq``) on parameters of the layer, so
that torch.compile takes it whole and CUDA graphs record it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kbitq._core import core
from kbitq.codecs.base import get_codec, part_kinds
from kbitq.integrations.serving.matrix import Matrix, decoded, fixed, merged
from kbitq.ops import tiled_linear  # noqa: F401  (registers linear_tiles)

Held = Mapping[str, "nn.Parameter | None"]


@dataclass(frozen=True)
class DensePiece:
    """Rows that are not quantized."""

    rows: int
    name: str

    def multiply(self, held: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T (+ bias)``."""
        return nn.functional.linear(x, held[self.name], bias)

    def decode(self, held: Any, dtype: torch.dtype) -> Tensor:
        """``[rows, cols]``."""
        weight: Tensor = held[self.name].to(dtype)
        return weight

    def lookup(self, held: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``[n, cols]``."""
        return nn.functional.embedding(ids, held[self.name]).to(dtype)


@dataclass(frozen=True)
class CodedPiece:
    """Rows held as their file has them.

    Attributes:
        rows: of it.
        cols: of it.
        codec: how it is coded.
        names: part -> parameter of the layer.
    """

    rows: int
    cols: int
    codec: str
    names: Mapping[str, str]

    def _parts(self, held: Any) -> dict[str, Tensor]:
        return {part: held[name] for part, name in self.names.items()}

    def multiply(self, held: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T (+ bias)``."""
        return get_codec(self.codec).linear(x, self._parts(held), bias)

    def decode(self, held: Any, dtype: torch.dtype) -> Tensor:
        """``[rows, cols]``."""
        return decoded(self.codec, self._parts(held), self.cols, dtype)

    def lookup(self, held: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``[n, cols]``."""
        kinds = part_kinds(self.codec)
        chosen = {part: held[name] if kinds[part] else held[name][ids] for part, name in self.names.items()}
        return get_codec(self.codec).decode(chosen, self.cols, dtype)


@dataclass(frozen=True)
class TiledPiece:
    """Rows held in tile order.

    Attributes:
        rows: of it.
        cols: of it.
        codec: how it is coded.
        data: parameter with the tiles.
        constants: parameter with the constants, one for each group of rows.
    """

    rows: int
    cols: int
    codec: str
    data: str
    constants: str

    def multiply(self, held: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T (+ bias)``."""
        return torch.ops.kbitq.linear_tiles(x, held[self.data], held[self.constants], bias, self.rows, self.codec)

    def _decode(self, data: Tensor, constants: Tensor, rows: int, dtype: torch.dtype, chosen: Any = None) -> Tensor:
        untiled = torch.ops.kbitq.untile(data, rows, self.cols, self.codec)
        held = untiled if chosen is None else [part[chosen] for part in untiled]
        parts = dict(zip(part_kinds(self.codec), (*held, constants), strict=True))
        return decoded(self.codec, parts, self.cols, dtype)

    def decode(self, held: Any, dtype: torch.dtype) -> Tensor:
        """``[rows, cols]``."""
        return self._decode(held[self.data], held[self.constants], self.rows, dtype)

    def lookup(self, held: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``[n, cols]``; the records of 16 rows that they lie in are turned back first."""
        height = core.tile_rows
        records = held[self.data][ids // height]
        chosen = torch.arange(ids.shape[0], device=ids.device) * height + ids % height
        return self._decode(records, held[self.constants], ids.shape[0] * height, dtype, chosen)


Piece = DensePiece | CodedPiece | TiledPiece


def place(layer: Any, matrices: Sequence[Matrix | Tensor], stem: str = "weight", *, tiled: bool = True) -> None:
    """Give a layer its weight: parameters, and ``kbitq_pieces``, which says what they are.

    Args:
        layer: gets the parameters; neighbouring matrices of one coding share theirs.
        matrices: the rows of the weight, one below the other, quantized or ordinary.
        stem: of the parameters' names.
        tiled: whether a GPU is to hold them in tile order: not for a table that is only looked up in.
    """
    pieces = [_placed(layer, matrix, f"{stem}_{i}", tiled) for i, matrix in enumerate(merged(matrices))]
    layer.kbitq_pieces = tuple(pieces)


def _placed(layer: Any, matrix: Matrix | Tensor, stem: str, tiled: bool) -> Piece:
    if isinstance(matrix, Tensor):
        layer.register_parameter(stem, fixed(matrix))
        return DensePiece(matrix.shape[0], stem)
    *_, last = matrix.parts.values()  # the constants come last
    if tiled and (tiles := tiles_of(matrix)) is not None:
        names = f"{stem}_tiles", f"{stem}_constants"
        layer.register_parameter(names[0], fixed(tiles))
        layer.register_parameter(names[1], fixed(last.reshape(-1, last.shape[-1])))
        return TiledPiece(matrix.rows, matrix.cols, matrix.codec, *names)
    held = {part: f"{stem}_{part}" for part in matrix.parts}
    for part, name in held.items():
        layer.register_parameter(name, fixed(matrix.parts[part]))
    return CodedPiece(matrix.rows, matrix.cols, matrix.codec, held)


def tiles_of(matrix: Matrix) -> Tensor | None:
    """The tile order of a matrix on a GPU; None where there is none."""
    tiles = get_codec(matrix.codec).tiles({part: held[None] for part, held in matrix.parts.items()}, matrix.cols)
    return None if tiles is None else tiles.data


def multiply(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T (+ bias)`` ``[..., rows]`` of a layer that :func:`place` has prepared."""
    pieces, held = layer.kbitq_pieces, layer._parameters
    if len(pieces) == 1:
        return pieces[0].multiply(held, x, bias)
    biases = [None] * len(pieces) if bias is None else bias.split([piece.rows for piece in pieces])
    return torch.cat([piece.multiply(held, x, own) for piece, own in zip(pieces, biases, strict=True)], -1)


def decode(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight ``[rows, cols]``."""
    return torch.cat([piece.decode(layer._parameters, dtype) for piece in layer.kbitq_pieces])


def lookup(layer: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the weight, ``[*ids.shape, cols]``."""
    (piece,) = layer.kbitq_pieces
    rows: Tensor = piece.lookup(layer._parameters, ids.reshape(-1), dtype)
    return rows.view(*ids.shape, rows.shape[-1])
