"""Results of a pipeline to their bytes of a shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from kbitq.checkpoint.output.file_writer import FileWriter
from kbitq.checkpoint.output.layout import Shard
from kbitq.checkpoint.passes.run_state import RunState
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.codecs.base import any_parts, part_name
from kbitq.format import stored_dtype


class Target(Protocol):
    """What bytes of a file are written to."""

    def write(self, offset: int, data: torch.Tensor | bytes) -> None:
        """Write all of ``data`` (contiguous, on the CPU) at byte ``offset``."""


class ShardWriter:
    """Writes what a pipeline made of the pieces of one shard, and tells the state how far each tensor is."""

    def __init__(self, shard: Shard, file: FileWriter, reader: TileReader, state: RunState) -> None:
        self._shard, self._file, self._reader, self._state = shard, file, reader, state

    def write(self, piece: Piece, made: torch.Tensor | QuantizedSpan) -> int:
        """Write the bytes (uint8) or the stored form of a piece. Returns how many bytes were written."""
        name, error_sums = piece.tensor.name, None
        if isinstance(made, QuantizedSpan):
            _, error_sums = self._state.written_so_far(name)
            error_sums.add(made.span, made.errors)
            written = write_span(made, name, self._shard, self._file)
        else:
            written = write_plain(piece, made, self._reader, self._shard, self._file)
        end = piece.start + piece.count
        if end == piece.tensor.nbytes:
            self._state.tensor_finished(name, error_sums)
        else:
            position = end if piece.span is None else piece.span.first_element + piece.span.numel
            self._state.tensor_reached(name, position, error_sums)
        return written


def write_plain(piece: Piece, raw: torch.Tensor, reader: TileReader, shard: Shard, file: Target) -> int:
    """Copy bytes. Scaled FP8 that is not quantized is written as what it decodes to, for its scales are gone."""
    offset = shard.offsets[piece.tensor.name]
    if piece.tensor.scaling is not None and piece.span is not None:
        raw = reader.values(piece.tensor, piece.span, raw)
        offset += piece.span.first_element * stored_dtype(piece.tensor.dtype).bits // 8
    else:
        offset += piece.start
    file.write(offset, raw)
    return raw.numel() * raw.element_size()


def write_span(made: QuantizedSpan, name: str, shard: Shard, file: Target) -> int:
    """Write a quantized span where it belongs (what is constant with the first); returns the bytes written."""
    written = 0
    shapes = {part: shard.shapes[part_name(name, part)] for part in made.parts}
    for part, offset, data in placed_parts(made, shapes):
        file.write(shard.offsets[part_name(name, part)] + offset, data)
        written += data.nbytes
    return written


def placed_parts(made: QuantizedSpan, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The parts of a span, each with the byte of the whole part where it belongs; constants with the first span only.

    ``shapes`` are those of the whole parts. One that is turned comes in a piece for each of its lines.
    """
    places = made.codec.place(made.span, made.k)
    turned = {part.name for part in any_parts(made.codec.name) if part.turned}
    for part, data in made.parts.items():
        if part in turned:
            yield from ((part, at, piece) for at, piece in _turned(made.span, data, shapes[part]))
        elif part in places or made.span.first_block == 0:
            yield part, places.get(part, 0), data


def _turned(span: Span, data: torch.Tensor, whole: tuple[int, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    """Some columns of a part that is ``whole`` ``[lines, rows of the matrix]``: of each line a piece."""
    row, column = divmod(span.first_element, span.row_length)
    rows_first = data.view(span.rows if span.whole_rows else 1, -1)
    lines = torch.empty(rows_first.shape[::-1], dtype=data.dtype).copy_(rows_first.t()).view(torch.uint8)
    first, size = column * whole[0] // span.row_length, data.element_size()
    if len(rows_first) == whole[1]:
        yield first * whole[1] * size, lines
        return
    for number, line in enumerate(lines, start=first):
        yield (number * whole[1] + row) * size, line
