"""Carrying out chunks: what is scanned, measured, fitted, written or sealed goes into the journal of this attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kbitq.checkpoint.allocation import feedback_meter, measure_tensor
from kbitq.checkpoint.passes.cpu_pipeline import CpuPipeline
from kbitq.checkpoint.passes.device_pipeline import DevicePipeline
from kbitq.checkpoint.passes.devices import resolve_devices
from kbitq.checkpoint.passes.levels import LevelSource
from kbitq.checkpoint.passes.pipeline import Pipeline, WorkItem
from kbitq.checkpoint.passes.run_state import RunState, Scan
from kbitq.checkpoint.passes.shard_writer import write_plain, write_span
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan, TileCodec
from kbitq.checkpoint.passes.work_list import WorkList
from kbitq.checkpoint.source.memory import tile_bytes
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.cluster.attempts import Attempt
from kbitq.cluster.chunks import Chunk, ChunkKey
from kbitq.cluster.commits import Commits
from kbitq.cluster.job import Job
from kbitq.cluster.pages import PageWriter
from kbitq.cluster.results import RowSums, levels_json, measured_json
from kbitq.cluster.sealing import SealAsWritten, Sealer
from kbitq.codecs.base import get_codec
from kbitq.format import matrix_shape

if TYPE_CHECKING:
    from kbitq.checkpoint.output.layout import Shard
    from kbitq.checkpoint.plan.tensor_plan import TensorPlan


class _BeatingReader(TileReader):
    """Says in the journal that bytes are read: a worker that hangs says nothing any more."""

    def __init__(self, checkpoint: Checkpoint, tile: int, attempt: Attempt) -> None:
        super().__init__(checkpoint, tile)
        self._attempt = attempt

    def read_into(self, tensor: SourceTensor, start: int, target: torch.Tensor) -> None:
        super().read_into(tensor, start, target)
        self._attempt.beat(target.numel())


class ChunkWork:
    """Carries out chunks of one job in this process.

    Args:
        job: the plan, in the phase of the chunks.
        attempt: whose journal gets the results.
        done: hears of each chunk.
        seals: files are sealed as soon as all their chunks are written.
    """

    def __init__(
        self, job: Job, attempt: Attempt, done: Callable[[Chunk], None] | None = None, *, seals: bool = True
    ) -> None:
        self.job, self.attempt = job, attempt
        self._done = done if done is not None else lambda _: None
        self._seals = seals
        self._devices = resolve_devices(job.plan.device)
        self._commits = Commits(job, attempt, self._check_unchanged)
        self._readers: list[TileReader] = []
        self._tensors: dict[str, TensorPlan] = {t.name: t for t in job.plan.tensors}

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Carry out chunks of the job's phase; once."""
        with ExitStack() as held:
            held.enter_context(self._commits)
            if chunks:
                _WORK[self.job.phase](self, chunks, held)
                self._commits.begin()
                self._commits.settle()

    def _reader(self, held: ExitStack, tile: int) -> TileReader:
        reader = held.enter_context(_BeatingReader(self.job.plan.checkpoint, tile, self.attempt))
        self._readers.append(reader)
        return reader

    def _pipeline(self, held: ExitStack) -> Pipeline:
        on_cpu = self._devices == ("cpu",)
        bound = self.job.plan.options.max_memory
        reader = self._reader(held, tile_bytes(bound, torch.get_num_threads() if on_cpu else None))
        return CpuPipeline(reader) if on_cpu else DevicePipeline(reader, self._devices)

    def _note(self, chunk: Chunk, result: Any, written: int = 0) -> None:
        """Record a chunk that is done; soon, and after its data, the record is on the disk."""
        self._commits.note(chunk.key, result, max(written, chunk.nbytes))
        self._done(chunk)

    def _check_unchanged(self) -> None:
        """A source that has changed since it was planned with leaves no line."""
        for reader in self._readers:
            reader.check_unchanged()

    def _measure(self, chunks: Sequence[Chunk], held: ExitStack) -> None:
        reader = self._reader(held, tile_bytes(self.job.plan.options.max_memory))
        codec = TileCodec(reader, self._devices[0])
        feedback = feedback_meter(self.job.plan, codec)
        for chunk in chunks:
            found = measure_tensor(self.job.plan, codec, self._tensors[chunk.name], feedback)
            self._note(chunk, measured_json(found))

    def _scan(self, chunks: Sequence[Chunk], held: ExitStack) -> None:
        pipeline = self._pipeline(held)
        waiting, found = iter(chunks), Scan()
        chunk = next(waiting)
        for piece, here in pipeline.scanned(self._pieces(chunks, pipeline.reader)):
            found.add(here)
            if _ends(piece, chunk):
                self._note(chunk, [found.amax.hex(), found.nonfinite, found.first])
                chunk, found = next(waiting, chunk), Scan()

    def _pieces(self, chunks: Iterable[Chunk], reader: TileReader) -> Iterator[Piece]:
        for chunk in chunks:
            source, tensor = self.job.plan.checkpoint.tensors[chunk.name], self._tensors[chunk.name]
            first = chunk.start * matrix_shape(tensor.name, tensor.shape)[1]
            yield from reader.matrix_pieces(source, first, get_codec(tensor.codec).cut, chunk.stop)

    def _fit(self, chunks: Sequence[Chunk], held: ExitStack) -> None:
        pipeline = self._pipeline(held)
        tensors = {t.name: t for t in self.job.plan.tensors}
        for chunk in chunks:
            source = LevelSource(self.job.plan, pipeline.reader, pipeline.device, self.job.scans)
            levels = source.levels(tensors[chunk.name])
            assert levels is not None
            self._note(chunk, levels_json(levels, source.gains[chunk.name]))

    def _write(self, chunks: Sequence[Chunk], held: ExitStack) -> None:
        pipeline = self._pipeline(held)
        sealer = held.enter_context(Sealer(self.job, self.job.chunks, self._commits, self.attempt))
        seals = SealAsWritten(self.job, chunks, self._commits, sealer)
        waiting = iter(chunks)
        chunk, filling = next(waiting), None
        for piece, made in pipeline.quantized(self._items(chunks, pipeline)):
            if filling is None:
                filling = _Filling(chunk, seals.shard_of(chunk.name), self._commits, pipeline.reader)
            filling.write(piece, made)
            if _ends(piece, chunk):
                self._note(chunk, filling.result(), filling.written)
                if self._seals:
                    seals.done(chunk)
                chunk, filling = next(waiting, chunk), None
        sealer.note_finished(wait=True)

    def _items(self, chunks: Sequence[Chunk], pipeline: Pipeline) -> Iterator[WorkItem]:
        plan, state = self.job.plan, RunState(scans=self.job.scans)
        levels = LevelSource(plan, pipeline.reader, pipeline.device, self.job.scans, self.job.levels)
        work = WorkList(plan, pipeline.reader, state, levels, ProgressMeter(None, 0), pipeline.device)
        for chunk in chunks:
            yield from work.items_between(self._tensors[chunk.name], chunk.start, chunk.stop)

    def _seal(self, chunks: Sequence[Chunk], held: ExitStack) -> None:
        sealer = held.enter_context(Sealer(self.job, self.job.written, self._commits, self.attempt))
        shards = {shard.name: shard for shard in self.job.plan.shards}
        for chunk in chunks:
            sealer.begin(chunk, shards[chunk.name])
            for sealed in sealer.note_finished(wait=sealer.full):
                self._done(sealed)
        for sealed in sealer.note_finished(wait=True):
            self._done(sealed)


class _Filling:
    """What is made of one chunk, on its way to its file."""

    def __init__(self, chunk: Chunk, shard: Shard, commits: Commits, reader: TileReader) -> None:
        self._chunk, self._shard, self._reader = chunk, shard, reader
        self._pages = commits.pages(shard.name, shard.nbytes)
        self._sums: RowSums | None = None
        self.written = 0  # bytes

    def write(self, piece: Piece, made: torch.Tensor | QuantizedSpan) -> None:
        target = _ChunkTarget(self._pages, self._chunk.key)
        if isinstance(made, QuantizedSpan):
            self._sums = self._sums or RowSums()
            self._sums.add(made)
            self.written += write_span(made, piece.tensor.name, self._shard, target)
        else:
            self.written += write_plain(piece, made, self._reader, self._shard, target)

    def result(self) -> dict[str, Any]:
        """Without the bytes on shared pages, which are known when it is committed."""
        return {"edges": [], **(self._sums.to_json() if self._sums is not None else {})}


@dataclass(frozen=True)
class _ChunkTarget:
    """The pages of a file, for the bytes of one chunk."""

    pages: PageWriter
    chunk: ChunkKey

    def write(self, offset: int, data: torch.Tensor | bytes) -> None:
        self.pages.write(offset, data, self.chunk)


def _ends(piece: Piece, chunk: Chunk) -> bool:
    """Whether a piece is the last one of a chunk."""
    if piece.span is None:
        return piece.start + piece.count == chunk.stop
    return piece.span.first_element + piece.span.numel == chunk.stop * piece.span.row_length


_WORK: Mapping[str, Callable[[ChunkWork, Sequence[Chunk], ExitStack], None]] = {
    "measure": ChunkWork._measure, "scan": ChunkWork._scan, "fit": ChunkWork._fit, "write": ChunkWork._write,
    "seal": ChunkWork._seal,
}  # fmt: skip
