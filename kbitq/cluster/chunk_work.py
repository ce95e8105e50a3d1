"""Carrying out chunks: what is scanned, measured, fitted, written or sealed goes into the journal of this attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kbitq.checkpoint.allocation import feedback_meter, measure_tensor
from kbitq.checkpoint.output.checksums import sha256
from kbitq.checkpoint.passes.cpu_pipeline import CpuPipeline
from kbitq.checkpoint.passes.device_pipeline import DevicePipeline
from kbitq.checkpoint.passes.devices import resolve_devices
from kbitq.checkpoint.passes.levels import LevelSource
from kbitq.checkpoint.passes.pipeline import Pipeline, WorkItem
from kbitq.checkpoint.passes.run_state import ErrorSums, RunState, Scan
from kbitq.checkpoint.passes.shard_writer import write_plain, write_span
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan, TileCodec
from kbitq.checkpoint.passes.work_list import WorkList
from kbitq.checkpoint.passes.write_pass import set_statistics
from kbitq.checkpoint.source.memory import tile_bytes
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.cluster.attempts import Attempt
from kbitq.cluster.chunks import Chunk
from kbitq.cluster.job import Job
from kbitq.cluster.pages import PageWriter, SharedFile
from kbitq.cluster.results import RowSums, edges_json, edges_of, levels_json, measured_json, merged_sums, sealed_json
from kbitq.codecs.base import get_codec
from kbitq.format import matrix_shape

if TYPE_CHECKING:
    from kbitq.checkpoint.output.layout import Shard
    from kbitq.checkpoint.plan.tensor_plan import TensorPlan

SYNC_BYTES = 256 << 20  # of the source: at most this much, or
SYNC_SECONDS = 5.0  # what was done in this long, is done again after a worker died


class _BeatingReader(TileReader):
    """Says in the journal that bytes are read: a worker that hangs says nothing any more."""

    def __init__(self, checkpoint: Checkpoint, tile: int, attempt: Attempt) -> None:
        super().__init__(checkpoint, tile)
        self._attempt = attempt

    def read_into(self, tensor: SourceTensor, start: int, target: torch.Tensor) -> None:
        super().read_into(tensor, start, target)
        self._attempt.beat(target.numel())


class _Commits:
    """Makes what was written durable, and then the lines about it, in a thread while the work goes on."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._files: dict[Path, SharedFile] = {}
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="kbitq-journal")
        self._under_way: Future[None] | None = None

    def __enter__(self) -> _Commits:
        return self

    def __exit__(self, *_: object) -> None:
        self._syncing.shutdown()
        _close(self._files.values())

    def file(self, path: Path, nbytes: int, *, begun: bool) -> SharedFile:
        """The file of the output, open until the next commit; ``begun`` as of ``SharedFile``."""
        if path not in self._files:
            self._files[path] = SharedFile(path, nbytes, begun=begun)
        return self._files[path]

    def begin(self) -> None:
        """Begin with all files and lines since the last call, when what that began is durable."""
        self.settle()
        files, self._files = list(self._files.values()), {}
        self._under_way = self._syncing.submit(_make_durable, files, self._attempt, self._attempt.take())

    def settle(self) -> None:
        """Return when the commit under way is durable; raise what it raised."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()


def _make_durable(files: Sequence[SharedFile], attempt: Attempt, lines: bytes) -> None:
    try:
        for file in files:
            file.sync()
    finally:
        _close(files)
    attempt.make_durable(lines)


def _close(files: Iterable[SharedFile]) -> None:
    for file in files:
        file.close()


class ChunkWork:
    """Carries out chunks of one job in this process. ``done`` hears of each chunk."""

    def __init__(self, job: Job, attempt: Attempt, done: Callable[[Chunk], None] | None = None) -> None:
        self.job, self.attempt = job, attempt
        self._done = done if done is not None else lambda _: None
        self._devices = resolve_devices(job.plan.device)
        self._unsynced, self._last_sync = 0, time.monotonic()
        self._commits = _Commits(attempt)
        self._readers: list[TileReader] = []
        self._begun: set[str] | None = None
        self._tensors: dict[str, TensorPlan] = {t.name: t for t in job.plan.tensors}

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Carry out chunks of the job's phase; once."""
        with ExitStack() as held:
            held.enter_context(self._commits)
            if chunks:
                _WORK[self.job.phase](self, chunks, held)
                self._commit()
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
        self.attempt.note_result(chunk.key, self.job.layout, result)
        self._unsynced += max(written, chunk.nbytes)
        if self._unsynced >= SYNC_BYTES or time.monotonic() - self._last_sync >= SYNC_SECONDS:
            self._commit()
        self._done(chunk)

    def _commit(self) -> None:
        """Between two chunks. A source that has changed since it was planned with leaves no line."""
        for reader in self._readers:
            reader.check_unchanged()
        self._commits.begin()
        self._unsynced, self._last_sync = 0, time.monotonic()

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
        plan, pipeline = self.job.plan, self._pipeline(held)
        tensors = {t.name: t for t in plan.tensors}
        shards = {n: s for s in plan.shards if s.meta is not None for n in (*s.meta.tensors, *s.meta.kept)}
        levels = LevelSource(plan, pipeline.reader, pipeline.device, self.job.scans, self.job.levels)
        state = RunState(scans=self.job.scans)
        work = WorkList(plan, pipeline.reader, state, levels, ProgressMeter(None, 0), pipeline.device)

        def items() -> Iterator[WorkItem]:
            for chunk in chunks:
                yield from work.items_between(tensors[chunk.name], chunk.start, chunk.stop)

        waiting = iter(chunks)
        chunk, filling = next(waiting), None
        for piece, made in pipeline.quantized(items()):
            if filling is None:
                shard = shards[chunk.name]
                filling = _Filling(shard, PageWriter(self._file(shard), self.job.file.page), pipeline.reader)
            filling.write(piece, made)
            if _ends(piece, chunk):
                self._note(chunk, filling.result(), filling.written)
                chunk, filling = next(waiting, chunk), None

    def _file(self, shard: Shard) -> SharedFile:
        return self._commits.file(
            self.job.staging.output / shard.name, shard.nbytes, begun=shard.name in self._begun_files()
        )

    def _begun_files(self) -> set[str]:
        """The files of which the journals know a chunk."""
        if self._begun is None:
            written = {key.name for key, layout in self.job.journals.places if layout == self.job.layout}
            metas = {s.name: s.meta for s in self.job.plan.shards if s.meta is not None}
            self._begun = {n for n, m in metas.items() if not written.isdisjoint((*m.tensors, *m.kept))}
        return self._begun

    def _seal(self, chunks: Sequence[Chunk], held: ExitStack) -> None:
        """As many files at once as there are threads, since a checksum is the work of one."""
        written = self.job.by_tensor(self.job.written)
        shards = {shard.name: shard for shard in self.job.plan.shards}
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads) as pool:
            for begin in range(0, len(chunks), threads):
                some = chunks[begin : begin + threads]
                files = [self._complete(shards[chunk.name], written) for chunk in some]
                digests = list(pool.map(self._synced, (file for file, _ in files)))  # a note may close all files
                for chunk, (_, sums), digest in zip(some, files, digests, strict=True):
                    self._note(chunk, sealed_json(digest, sums), shards[chunk.name].nbytes)

    def _complete(
        self, shard: Shard, written: Mapping[str, Sequence[Chunk]]
    ) -> tuple[SharedFile, dict[str, ErrorSums]]:
        """Write what chunks have left of a file to whoever seals it, and its header."""
        assert shard.meta is not None
        file = self._file(shard)
        for name in (*shard.meta.tensors, *shard.meta.kept):
            for part in written.get(name, ()):
                for offset, data in edges_of(self.job.result(part), shard.header_nbytes, shard.nbytes):
                    file.write_at(offset, data)
        sums = {
            name: merged_sums((part, self.job.result(part)) for part in written[name]) for name in shard.meta.tensors
        }
        set_statistics(shard, sums)
        file.write_at(0, shard.header())
        return file, sums

    def _synced(self, file: SharedFile) -> str:
        """Make a file durable, and meanwhile its checksum, where the output has any."""
        with ThreadPoolExecutor(1) as pool:
            synced = pool.submit(file.sync)
            digest = sha256(file.path, self.attempt.beat) if self.job.to_folder else ""
            synced.result()
        return digest


class _Filling:
    """What is made of one chunk, on its way to its file."""

    def __init__(self, shard: Shard, pages: PageWriter, reader: TileReader) -> None:
        self._shard, self._pages, self._reader = shard, pages, reader
        self._sums: RowSums | None = None
        self.written = 0

    def write(self, piece: Piece, made: torch.Tensor | QuantizedSpan) -> None:
        if isinstance(made, QuantizedSpan):
            self._sums = self._sums or RowSums()
            self._sums.add(made)
            self.written += write_span(made, piece.tensor.name, self._shard, self._pages)
        else:
            self.written += write_plain(piece, made, self._reader, self._shard, self._pages)

    def result(self) -> dict[str, Any]:
        sums = self._sums.to_json() if self._sums is not None else {}
        return {"edges": edges_json(self._pages.edges()), **sums}


def _ends(piece: Piece, chunk: Chunk) -> bool:
    """Whether a piece is the last one of a chunk."""
    if piece.span is None:
        return piece.start + piece.count == chunk.stop
    return piece.span.first_element + piece.span.numel == chunk.stop * piece.span.row_length


_WORK: Mapping[str, Callable[[ChunkWork, Sequence[Chunk], ExitStack], None]] = {
    "measure": ChunkWork._measure, "scan": ChunkWork._scan, "fit": ChunkWork._fit, "write": ChunkWork._write,
    "seal": ChunkWork._seal,
}  # fmt: skip
