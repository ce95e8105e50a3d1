"""Results of a pipeline to their bytes of a shard."""

from __future__ import annotations

from typing import Protocol

import torch

from kbitq.checkpoint.output.file_writer import FileWriter
from kbitq.checkpoint.output.layout import Shard
from kbitq.checkpoint.passes.run_state import RunState
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.codecs.base import part_name
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
    places, written = made.codec.place(made.span, made.k), 0
    for part, data in made.parts.items():
        if part in places or made.span.first_block == 0:
            file.write(shard.offsets[part_name(name, part)] + places.get(part, 0), data)
            written += data.nbytes
    return written
