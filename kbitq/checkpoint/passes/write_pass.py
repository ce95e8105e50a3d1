"""The second pass over the source: quantizes or copies every tensor and writes it where the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kbitq.checkpoint.output.checksums import sha256
from kbitq.checkpoint.output.file_writer import FileWriter, sync_folder
from kbitq.checkpoint.output.layout import Shard
from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.passes.journal import Journal
from kbitq.checkpoint.passes.levels import LevelSource
from kbitq.checkpoint.passes.pipeline import Pipeline
from kbitq.checkpoint.passes.run_state import ErrorSums, RunState
from kbitq.checkpoint.passes.scan_pass import scan_tensors
from kbitq.checkpoint.passes.shard_writer import ShardWriter
from kbitq.checkpoint.passes.spool import Spool, groups
from kbitq.checkpoint.passes.work_list import WorkList
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.progress import ProgressMeter


class WritePass:
    """The second pass: fills the shards of a plan, tile by tile, in place.

    With a ``spool`` it does the first pass too, some tensors ahead of the second, so that both take one fetch.
    """

    def __init__(
        self,
        plan: Plan,
        pipeline: Pipeline,
        staging: Staging,
        state: RunState,
        journal: Journal,
        meter: ProgressMeter,
        spool: Spool | None = None,
    ) -> None:
        self.plan, self.pipeline, self.staging = plan, pipeline, staging
        self.state, self.journal, self.meter = state, journal, meter
        self._spool = spool
        self._levels = LevelSource(plan, pipeline.reader, pipeline.device, state.scans)
        self._work = WorkList(plan, pipeline.reader, state, self._levels, meter, pipeline.device)
        self._place = {t.name: i for i, t in enumerate(plan.tensors)}

    @property
    def fit_gain_db(self) -> float | None:
        """What fitting codebooks gained over ``optimal``, as far as this run did it; None without."""
        return self._levels.fit_gain_db

    @property
    def notes(self) -> list[str]:
        """Sentences about the statistics of a calibration, as far as this run used them."""
        return self._work.notes

    def run(self) -> None:
        """Fill all shards, each complete and synced."""
        for shard in self.plan.shards:
            # All room is taken at once: a disk that is too small is noticed in the first second, not after hours.
            FileWriter(self.staging.path(shard.name), shard.nbytes).__exit__()
        sync_folder(self.staging.output)
        with FileDigests(self.staging, self.state, wanted=self.plan.to_folder) as digests:
            for shard in self.plan.shards:
                self._fill(shard, digests)
                digests.note_finished(wait=False)
                self.journal.commit()
            digests.note_finished(wait=True)
            self.journal.commit()

    def _fill(self, shard: Shard, digests: FileDigests) -> None:
        tensors = self._tensors_of(shard)
        if shard.name in self.state.digests and all(t.name in self.state.tensors for t in tensors):
            set_statistics(shard, self.state.tensors)
            for tensor in tensors:
                self.meter.add(tensor.bytes_in, tensor.name)
            return
        with FileWriter(self.staging.path(shard.name), shard.nbytes) as file, self.journal.settled():
            if self._spool is None:
                self._write(tensors, shard, file)
            else:
                self._scan_and_write(tensors, shard, file, self._spool)
            set_statistics(shard, self.state.tensors)
            file.write(0, shard.header())
            digest = digests.begin(shard.name)
            file.sync()
        digests.synced(shard.name, digest)

    def _tensors_of(self, shard: Shard) -> list[TensorPlan]:
        """The tensors of a shard in the order of the source's bytes."""
        assert shard.meta is not None
        members = [*shard.meta.tensors, *shard.meta.kept]
        return [self.plan.tensors[i] for i in sorted(self._place[name] for name in members)]

    def _scan_and_write(self, tensors: Sequence[TensorPlan], shard: Shard, file: FileWriter, spool: Spool) -> None:
        for group in groups(tensors):
            spool.keeping = True
            selected = [t for t in group if t.quantized]
            scan_tensors(self.plan, selected, self.pipeline, self.state, self.journal, self.meter, file.sync)
            spool.keeping = False
            self._write(group, shard, file)
            spool.clear()

    def _write(self, tensors: Sequence[TensorPlan], shard: Shard, file: FileWriter) -> None:
        writer = ShardWriter(shard, file, self.pipeline.reader, self.state)
        for piece, made in self.pipeline.quantized(self._work.items(tensors)):
            written = writer.write(piece, made)
            self.meter.add(piece.count, piece.tensor.name)
            if self.journal.due(written):
                self.journal.begin_commit(file.sync)
        for tensor in tensors:
            if tensor.name not in self.state.tensors:  # no bytes at all: there was no piece of it
                self.state.tensor_finished(tensor.name, None)
        self.journal.commit(file.sync)


def set_statistics(shard: Shard, found: Mapping[str, ErrorSums | None]) -> None:
    """Give the shard's metadata what the header says of each quantized tensor."""
    assert shard.meta is not None
    for name, meta in shard.meta.tensors.items():
        error_sums = found[name]
        assert error_sums is not None
        meta.sqnr_db, meta.max_abs_err = error_sums.sqnr_db, error_sums.max_abs_err


class FileDigests:
    """SHA-256 of the output's files, made in a thread while the disk and the next shard are busy.

    Not ``wanted`` where nothing needs them: only a folder has SHA256SUMS.
    """

    def __init__(self, staging: Staging, state: RunState, *, wanted: bool) -> None:
        self._staging, self._state, self._wanted = staging, state, wanted
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kbitq-hash")
        self._synced: dict[str, Future[str] | None] = {}

    def __enter__(self) -> FileDigests:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, name: str) -> Future[str] | None:
        """Begin to hash a file that is complete. It need not be on the disk yet."""
        return self._pool.submit(sha256, self._staging.path(name)) if self._wanted else None

    def synced(self, name: str, digest: Future[str] | None) -> None:
        """The file is on the disk now."""
        self._synced[name] = digest

    def note_finished(self, *, wait: bool) -> None:
        """Tell the state of the files that are on the disk and hashed; with ``wait``, of all that are on the disk."""
        for name, digest in list(self._synced.items()):
            if digest is None or wait or digest.done():
                self._state.file_finished(name, digest.result() if digest is not None else "")
                del self._synced[name]
