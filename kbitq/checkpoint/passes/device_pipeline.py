"""The pipeline through one or several GPUs: reading, copying both ways, computing and writing at the same time.

Each tile in flight has a lane to itself. Threads read tiles ahead, straight into the buffers of the lanes. A tile's
copies and kernels are queued as soon as its bytes are there. Results are handed on in order, so that writer, state and
error sums see what they would see on the CPU, and the output does not depend on which device worked on which tile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from kbitq import ops
from kbitq.checkpoint.passes.lane import Lane, Strips
from kbitq.checkpoint.passes.pipeline import WorkItem
from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan, Request, quantize_tile, scan_result
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.codecs.base import get_codec, part_kinds

IN_FLIGHT = 6  # tiles being read, computed, or waiting to be written (kbitq.checkpoint.source.memory counts on it)
READERS = 4  # one thread copies some 5 GB/s out of the page cache

Result = TypeVar("Result")
Finish = Callable[[], Result]  # waits for the lane
Begin = Callable[[torch.Tensor, Lane], Finish[Result]]  # queues the work on a tile's bytes


@dataclass
class _Tile(Generic[Result]):
    """A tile in flight: ``raw`` is read, then ``begin`` gives ``finish``, then that gives the result."""

    piece: Piece
    lane: Lane
    begin: Begin[Result]
    raw: Future[torch.Tensor]
    finish: Finish[Result] | None = None


class DevicePipeline:
    """The ``Pipeline`` on ``devices``; work between the tiles runs on the first of them."""

    def __init__(self, reader: TileReader, devices: Sequence[str]) -> None:
        count = max(IN_FLIGHT, 2 * len(devices))
        reader.tile_bytes = reader.tile_bytes * IN_FLIGHT // count  # the same memory, in more places
        self.reader, self.device = reader, devices[0]
        self.lanes = [Lane(devices[i % len(devices)]) for i in range(count)]
        self._work = _TileWork(reader, Strips(self.lanes, reader.tile_bytes))

    def scanned(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Scan]]:
        return self._flow((piece, partial(self._work.scan, piece)) for piece in pieces)

    def quantized(self, work: Iterable[WorkItem]) -> Iterator[tuple[Piece, torch.Tensor | QuantizedSpan]]:
        return self._flow((item.piece, partial(self._work.quantize, item)) for item in work)

    def _flow(self, work: Iterable[tuple[Piece, Begin[Result]]]) -> Iterator[tuple[Piece, Result]]:
        """All pieces in order, each with its result, valid until the next is asked for."""
        source, turn = iter(work), 0
        tiles: deque[_Tile[Result]] = deque()
        with ThreadPoolExecutor(READERS, thread_name_prefix="kbitq-read") as pool:
            try:
                while True:
                    while len(tiles) < len(self.lanes) and (item := next(source, None)) is not None:
                        piece, begin = item
                        lane = self.lanes[turn % len(self.lanes)]
                        tiles.append(_Tile(piece, lane, begin, pool.submit(self._read, piece, lane)))
                        turn += 1
                    if not tiles:
                        return
                    for tile in tiles:
                        if tile.finish is None and (tile is tiles[0] or tile.raw.done()):
                            tile.finish = tile.begin(tile.raw.result(), tile.lane)
                    first = tiles.popleft()
                    assert first.finish is not None
                    yield first.piece, first.finish()
            finally:
                pool.shutdown(cancel_futures=True)
                for lane in self.lanes:  # nothing may still be writing to a buffer when it is let go
                    lane.wait()

    def _read(self, piece: Piece, lane: Lane) -> torch.Tensor:
        raw = lane.buffer("in", piece.count)
        self.reader.read_into(piece.tensor, piece.start, raw)
        return raw


class _TileWork:
    """What is done with the bytes of one tile on a lane. A call queues it and returns what waits for its result."""

    def __init__(self, reader: TileReader, strips: Strips) -> None:
        self._reader, self._strips = reader, strips
        self._levels: dict[tuple[torch.device, bytes], torch.Tensor] = {}

    def scan(self, piece: Piece, raw: torch.Tensor, lane: Lane) -> Finish[Scan]:
        span = piece.span
        assert span is not None
        values = self._reader.values(piece.tensor, span, raw)
        found: list[tuple[int, torch.Tensor, torch.Tensor]] = []

        def strip(rows: slice) -> None:
            w = values[rows].to(lane.device, non_blocking=True)
            found.append((span.first_element + rows.start * span.cols, *ops.scan(w)))

        self._strips.queue(strip, values, lane)

        def finish() -> Scan:
            lane.wait()
            scan = Scan()
            for one in found:
                scan.add(scan_result(*one))
            return scan

        return finish

    def quantize(self, item: WorkItem, raw: torch.Tensor, lane: Lane) -> Finish[torch.Tensor | QuantizedSpan]:
        if item.request is None:
            return lambda: raw
        return self._quantize(item.piece, item.request, raw, lane)

    def _quantize(self, piece: Piece, request: Request, raw: torch.Tensor, lane: Lane) -> Finish[QuantizedSpan]:
        span = piece.span
        assert span is not None
        values = self._reader.values(piece.tensor, span, raw)
        codec = get_codec(request.codec)
        made, levels = lane.outputs(span, codec, request.k), self._levels_on(lane.device, request.levels)
        per_row = span.sums // span.rows
        kinds, constants = part_kinds(codec.name), dict[str, torch.Tensor]()

        def strip(rows: slice) -> None:
            w = values[rows].to(lane.device, non_blocking=True)
            parts, errors = quantize_tile(w, span, levels, request.of_rows(rows))
            made.errors[rows.start * per_row : rows.stop * per_row].copy_(errors, non_blocking=True)
            for name, part in parts.items():
                if kinds[name]:
                    constants[name] = part  # the same of every strip of the tile
                else:
                    made.parts[name][rows].copy_(part, non_blocking=True)

        self._strips.queue(strip, values, lane, divisible=request.divisible, whole=request.factor is not None)

        def finish() -> QuantizedSpan:
            lane.wait()
            for name, constant in constants.items():
                made.parts[name].copy_(constant)
            return made

        return finish

    def _levels_on(self, device: torch.device, levels: torch.Tensor | None) -> torch.Tensor | None:
        """The levels on a device, copied there once."""
        if levels is None:
            return None
        key = device, levels.numpy().tobytes()
        if key not in self._levels:
            self._levels[key] = levels.to(device)
        return self._levels[key]
