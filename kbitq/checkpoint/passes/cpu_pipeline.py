"""The pipeline on the CPU: one thread reads ahead, one quantizes with all cores, the caller writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import tee

import torch

from kbitq.checkpoint.passes.pipeline import WorkItem
from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan, Request, TileCodec
from kbitq.checkpoint.source.tile_reader import WORTH_A_THREAD, Piece, TileReader

Made = torch.Tensor | QuantizedSpan


class CpuPipeline:
    """The ``Pipeline`` of a run without a GPU. Three pieces are in hand at a time, so that the cores are never idle:

    reader    | read 2     | read 3
    codec     | quantize 1 | quantize 2
    caller    | write 0    | write 1
    """

    device = "cpu"

    def __init__(self, reader: TileReader) -> None:
        self.reader, self._codec = reader, TileCodec(reader)

    def scanned(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Scan]]:
        for piece, raw in self.reader.stream(pieces):
            assert piece.span is not None
            yield piece, self._codec.scan_span(piece.span, self.reader.values(piece.tensor, piece.span, raw))

    def quantized(self, work: Iterable[WorkItem]) -> Iterator[tuple[Piece, Made]]:
        items, to_read = tee(work)
        with ThreadPoolExecutor(1, thread_name_prefix="kbitq-codec") as pool:
            before: tuple[Piece, Made | Future[QuantizedSpan]] | None = None
            for item, (piece, raw) in zip(items, self.reader.stream(i.piece for i in to_read), strict=True):
                made: Made | Future[QuantizedSpan] = raw
                if item.request is not None:
                    in_thread = piece.count >= WORTH_A_THREAD
                    made = (pool.submit if in_thread else _now)(self._quantize, piece, raw, item.request)
                if before is not None:
                    yield before[0], _ready(before[1])
                before = piece, made
            if before is not None:
                yield before[0], _ready(before[1])

    def _quantize(self, piece: Piece, raw: torch.Tensor, request: Request) -> QuantizedSpan:
        assert piece.span is not None
        return self._codec.quantize_span(piece.span, self.reader.values(piece.tensor, piece.span, raw), request)


def _now(call: Callable[..., QuantizedSpan], *arguments: object) -> QuantizedSpan:
    return call(*arguments)


def _ready(made: Made | Future[QuantizedSpan]) -> Made:
    return made.result() if isinstance(made, Future) else made
