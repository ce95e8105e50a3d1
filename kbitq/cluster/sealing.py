"""Sealing a file of the output: what chunks have left of it, its header, its checksum.

The header says how well each tensor was quantized, and it comes first: so no byte of a file can be summed before all of
it is made. What can be had at the same time is the writing of other files, and the disk's work on this one. A sum goes
into the journal only when every byte that it was made of is durable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from kbitq.checkpoint.output.checksums import sha256
from kbitq.checkpoint.passes.write_pass import set_statistics
from kbitq.cluster.chunks import Chunk, chunks_of
from kbitq.cluster.commits import Commits
from kbitq.cluster.results import edges_of, merged_sums, sealed_json

if TYPE_CHECKING:
    from kbitq.checkpoint.output.layout import Shard
    from kbitq.checkpoint.passes.run_state import ErrorSums
    from kbitq.cluster.attempts import Attempt
    from kbitq.cluster.job import Job


class Sealer:
    """Seals files: as many sums are made at once as there are threads, since one is the work of one thread.

    Args:
        job: whose files.
        written: the chunks that the files consist of.
        commits: where results are noted.
        attempt: hears of bytes that are read.
    """

    def __init__(self, job: Job, written: Sequence[Chunk], commits: Commits, attempt: Attempt) -> None:
        self._job, self._commits, self._attempt = job, commits, attempt
        self._written = job.by_tensor(written)
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kbitq-hash")
        self._pending: dict[Chunk, tuple[Future[str], dict[str, ErrorSums]]] = {}

    def __enter__(self) -> Sealer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def full(self) -> bool:
        """Whether there is a file for each thread."""
        return len(self._pending) >= self._threads

    def begin(self, chunk: Chunk, shard: Shard) -> None:
        """Complete a file all chunks of which are done, and begin with its checksum, where the output has any."""
        assert shard.meta is not None
        file = self._commits.file(shard.name, shard.nbytes)
        results = {
            name: [(part, self._result(part)) for part in self._written.get(name, ())]
            for name in (*shard.meta.tensors, *shard.meta.kept)
        }
        for parts in results.values():
            for _, result in parts:
                for offset, data in edges_of(result, shard.header_nbytes, shard.nbytes):
                    file.write_at(offset, data)
        sums = {name: merged_sums(results[name]) for name in shard.meta.tensors}
        set_statistics(shard, sums)
        file.write_at(0, shard.header())
        self._pending[chunk] = self._pool.submit(self._sum, shard), sums

    def note_finished(self, *, wait: bool) -> list[Chunk]:
        """Note the files that have their sums; with ``wait`` all. Returns them."""
        if wait and self._pending:
            self._commits.begin()  # the disk is busy with headers meanwhile
        ready = [chunk for chunk, (digest, _) in self._pending.items() if wait or digest.done()]
        for chunk in ready:
            digest, sums = self._pending.pop(chunk)
            self._commits.note(chunk.key, sealed_json(digest.result(), sums), chunk.nbytes)
        return ready

    def _sum(self, shard: Shard) -> str:
        path = self._job.staging.output / shard.name
        return sha256(path, self._attempt.beat) if self._job.to_folder else ""

    def _result(self, chunk: Chunk) -> Any:
        found = self._commits.result(chunk.key)
        return self._job.result(chunk) if found is None else found


class SealAsWritten:
    """Seals each file when its last chunk is written, while others are: what one process does of the phase ``write``.

    A file of which another process has chunks that the journals do not know yet is left to whoever comes last.

    Args:
        job: in the phase ``write``.
        chunks: that this process does of it.
        commits: that they are noted in.
        sealer: of all chunks of the phase.
    """

    def __init__(self, job: Job, chunks: Sequence[Chunk], commits: Commits, sealer: Sealer) -> None:
        self._job, self._commits, self._sealer = job, commits, sealer
        shards = job.plan.shards
        self._shard = {n: s for s in shards if s.meta is not None for n in (*s.meta.tensors, *s.meta.kept)}
        self._seals = {c.name: c for c in chunks_of("seal", job.plan, job.file.chunk_bytes)}
        self._mine = {c.key for c in chunks}
        self._left = Counter(self._shard[c.name].name for c in chunks)

    def shard_of(self, name: str) -> Shard:
        """The file that a tensor goes to."""
        return self._shard[name]

    def done(self, chunk: Chunk) -> None:
        """A chunk was noted; seal its file when this was the last one, and note those that have their sums."""
        shard = self._shard[chunk.name]
        self._left[shard.name] -= 1
        if not self._left[shard.name] and self._complete(shard):
            # What this process has done is in its journal, or in the commit that this begins.
            self._commits.begin()
            self._job.journals.update()
            self._sealer.begin(self._seals[shard.name], shard)
        self._sealer.note_finished(wait=False)

    def _complete(self, shard: Shard) -> bool:
        """Whether all chunks of a file are done, here or elsewhere, and it is not sealed."""
        if self._job.is_done(self._seals[shard.name]):
            return False
        others = [c for c in self._job.chunks if self._shard[c.name] is shard and c.key not in self._mine]
        if all(map(self._job.is_done, others)):
            return True
        self._job.journals.update()
        return all(map(self._job.is_done, others))
