"""Tiles through one or several GPUs: reading, copying both ways, computing and writing all at the same time.

A tile in flight has a lane to itself: a device, a stream on it, and page-locked buffers for what goes in and comes out.
Threads read tiles ahead straight into those buffers; a tile's copies and kernels are queued as soon as its bytes are
there; results are handed on in order, so journal, writer and error sums see what they would see on the CPU, and which
device worked on a tile leaves no trace. A GPU without room for a tile is given it in parts, a run of rows at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kbitq import ops
from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan, Request, TileCodec
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.format import block_count

IN_FLIGHT = 6  # tiles being read, computed, or waiting to be written (kbitq.checkpoint.memory counts on it)
READERS = 4  # one thread copies some 5 GB/s out of the page cache
MIN_PART_BYTES = 64 << 10  # a GPU without room even for this is out of memory

Finish = Callable[[], "torch.Tensor | QuantizedSpan | Scan"]


class Lane:
    """The place of one tile in flight. ``device`` may be the CPU, where nothing is page-locked and nothing waits."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.is_cuda else None
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, nbytes: int) -> torch.Tensor:
        """``nbytes`` of this lane's host memory, uint8; what it held before is overwritten."""
        if name not in self._buffers or self._buffers[name].numel() < nbytes:
            self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)
        return self._buffers[name][:nbytes]

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


@dataclass
class _Tile:
    piece: Piece
    lane: Lane
    raw: Future[torch.Tensor]
    finish: Finish | None = None


class DevicePipeline(TileCodec):
    """A ``TileCodec`` whose streams of tiles run on ``devices``; single spans run on the first of them."""

    def __init__(self, reader: TileReader, devices: Sequence[str]) -> None:
        super().__init__(reader, devices[0])
        count = max(IN_FLIGHT, 2 * len(devices))
        self.lanes = [Lane(devices[i % len(devices)]) for i in range(count)]
        reader.tile_bytes = reader.tile_bytes * IN_FLIGHT // count  # the same memory, in more places
        self.part_bytes = reader.tile_bytes  # of a tile's values, that go to a device at once
        self._constants: dict[tuple[torch.device, bytes], torch.Tensor] = {}

    def scanned(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Scan]]:
        for piece, found in self._flow(pieces, self._begin_scan):
            assert isinstance(found, Scan)
            yield piece, found

    def quantized(
        self, pieces: Iterable[Piece], request: Callable[[Piece], Request | None]
    ) -> Iterator[tuple[Piece, torch.Tensor | QuantizedSpan]]:
        def begin(piece: Piece, raw: torch.Tensor, lane: Lane) -> Finish:
            wanted = request(piece)
            return (lambda: raw) if wanted is None else self._begin_quantize(piece, raw, lane, wanted)

        for piece, made in self._flow(pieces, begin):
            assert not isinstance(made, Scan)
            yield piece, made

    def _flow(
        self, pieces: Iterable[Piece], begin: Callable[[Piece, torch.Tensor, Lane], Finish]
    ) -> Iterator[tuple[Piece, torch.Tensor | QuantizedSpan | Scan]]:
        """All pieces in order, each with what ``begin``'s work on it gave, valid until the next is asked for."""
        source, turn = iter(pieces), 0
        tiles: deque[_Tile] = deque()
        with ThreadPoolExecutor(READERS, thread_name_prefix="kbitq-read") as pool:
            try:
                while True:
                    while len(tiles) < len(self.lanes) and (piece := next(source, None)) is not None:
                        lane = self.lanes[turn % len(self.lanes)]
                        tiles.append(_Tile(piece, lane, pool.submit(self._read, piece, lane)))
                        turn += 1
                    if not tiles:
                        return
                    for tile in tiles:
                        if tile.finish is None and (tile is tiles[0] or tile.raw.done()):
                            tile.finish = begin(tile.piece, tile.raw.result(), tile.lane)
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

    def _begin_scan(self, piece: Piece, raw: torch.Tensor, lane: Lane) -> Finish:
        span, values = self._values(piece, raw)
        found: list[tuple[int, torch.Tensor, torch.Tensor]] = []

        def part(first: int, rows: int) -> None:
            w = values[first : first + rows].to(lane.device, non_blocking=True)
            found.append((span.first_element + first * span.cols, *ops.scan(w)))

        self._by_rows(part, values, lane)

        def finish() -> Scan:
            lane.wait()
            scan = Scan()
            for offset, amax, status in found:
                count, first = status.tolist()
                scan.add(Scan(amax.item(), count, offset + first if count else -1))
            return scan

        return finish

    def _begin_quantize(self, piece: Piece, raw: torch.Tensor, lane: Lane, wanted: Request) -> Finish:
        span, values = self._values(piece, raw)
        done, codebook, device = self._outputs(lane, span, wanted.k), torch.empty(0), lane.device
        levels = self._constant(wanted.levels, device)

        def part(first: int, rows: int) -> None:
            nonlocal codebook
            here = slice(first, first + rows)
            w = values[here].to(device, non_blocking=True)
            weights = wanted.importance
            if weights is not None:
                weights = (weights if weights.shape[0] == 1 else weights[here]).to(device)
            packed, absmax = (torch.empty_like(t[here], device=device) for t in (done.packed, done.absmax))
            codebook = torch.empty_like(levels)
            amax = torch.full((1,), wanted.amax, dtype=torch.float32, device=device)
            ops.quantize_into(w, levels, packed, absmax, codebook, amax=amax, importance=weights, scale=wanted.scale)
            made = (packed, absmax, ops.stats(w, packed, absmax, codebook))
            for target, result in zip((done.packed, done.absmax, done.errors), made, strict=True):
                target[here].copy_(result, non_blocking=True)

        self._by_rows(part, values, lane)

        def finish() -> QuantizedSpan:
            lane.wait()
            done.codebook.copy_(codebook)
            return done

        return finish

    def _values(self, piece: Piece, raw: torch.Tensor) -> tuple[Span, torch.Tensor]:
        assert piece.span is not None
        return piece.span, self.reader.values(piece.tensor, piece.span, raw)

    def _outputs(self, lane: Lane, span: Span, k: int) -> QuantizedSpan:
        """A span's results in the lane's host memory: statistics first, whose elements are the widest."""
        blocks = block_count(span.cols)
        shapes = (
            ((span.rows, ops.STATS_COLUMNS), torch.float64),
            ((span.rows, blocks * k), torch.int32),
            ((1 << k,), torch.float32),
            ((span.rows, blocks), torch.uint8),
        )
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
        pieces = lane.buffer("out", sum(sizes)).split(sizes)
        errors, packed, codebook, absmax = (
            data.view(dtype).view(shape) for data, (shape, dtype) in zip(pieces, shapes, strict=True)
        )
        return QuantizedSpan(span, packed, absmax, codebook, errors)

    def _by_rows(self, part: Callable[[int, int], None], values: torch.Tensor, lane: Lane) -> None:
        """Queue ``part(first row, rows)`` for all rows, in parts that the device has room for."""
        total, row_bytes, first = values.shape[0], values.shape[1] * values.element_size(), 0
        with torch.cuda.stream(lane.stream):
            while first < total:
                rows = min(total - first, max(1, self.part_bytes // row_bytes))
                try:
                    part(first, rows)
                except torch.OutOfMemoryError:
                    if rows == 1 or rows * row_bytes <= MIN_PART_BYTES:
                        raise
                    self.part_bytes = rows * row_bytes // 2
                    for other in self.lanes:
                        other.wait()
                    torch.cuda.empty_cache()
                else:
                    first += rows

    def _constant(self, levels: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The levels on a device, copied there once."""
        key = device, levels.numpy().tobytes()
        if key not in self._constants:
            self._constants[key] = levels.to(device)
        return self._constants[key]
