"""What a pipeline is: a stream of pieces or work items goes down, a stream of results comes up in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan, Request
from kbitq.checkpoint.source.tile_reader import Piece, TileReader


@dataclass(frozen=True)
class WorkItem:
    """A piece to read, and how it is to be quantized; ``request`` None: its bytes are wanted as they are."""

    piece: Piece
    request: Request | None


class Pipeline(Protocol):
    """Reads pieces ahead, works on some of them at once, and hands the results on in order.

    Items are taken from the stream some time before their results come up: what makes the stream must not wait for
    them. A result is good until the next one is asked for.
    """

    reader: TileReader
    device: str  # for work between the tiles, such as fitting a codebook

    def scanned(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Scan]]:
        """Each piece with what was found in it alone."""

    def quantized(self, work: Iterable[WorkItem]) -> Iterator[tuple[Piece, torch.Tensor | QuantizedSpan]]:
        """Each piece with its bytes (uint8), or with its stored form where the item has a request."""
