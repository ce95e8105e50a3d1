"""``work``: one part of a plan, phase by phase; it can be repeated, interrupted and done twice at once without harm.

Each phase needs the results of the one before it, of all parts. A worker that is done with its part of a phase waits
for the others as long as a journal of theirs grows. When none has grown for a while (they have died, or were not
started), it does what is missing itself.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kbitq.checkpoint.source.progress import Progress
from kbitq.cluster.attempts import Attempt
from kbitq.cluster.chunk_work import ChunkWork
from kbitq.cluster.chunks import Chunk, Part
from kbitq.cluster.job import Job
from kbitq.errors import OptionError

PATIENCE_SECONDS = 120.0  # above the time (60 s by default) that NFS may go on showing an old size of a file
_LOOK_SECONDS = 1.0
_FIRST_WORD_SECONDS, _TELL_SECONDS = 2.0, 30.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class WorkReport:
    """What a worker did.

    Attributes:
        part: its part.
        done: chunks that it did.
        reused: chunks of its part that were done before.
        taken_over: chunks of others among those that it did.
    """

    part: Part
    done: int
    reused: int
    taken_over: int


def part_of_environment(environment: Mapping[str, str] = os.environ) -> Part | None:
    """The part that a launcher gives this process: RANK and WORLD_SIZE, or the task of a Slurm array; else None."""
    for index, count, first, step in (
        ("RANK", "WORLD_SIZE", "", ""),
        ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"),
    ):
        if index in environment and count in environment:
            try:
                start, apart = int(environment.get(first, "0")), max(1, int(environment.get(step, "1")))
                mine, of = (int(environment[index]) - start) // apart, int(environment[count])
            except ValueError:
                raise OptionError(f"{index} and {count} of the environment are no numbers", argument="part") from None
            return Part(mine, of)
    return None


def parse_part(text: str) -> Part:
    """``I/N`` as a part. Raises OptionError for anything else."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if found is None:
        raise OptionError(f"part must be I/N, such as 0/4, not {text!r}", argument="part")
    return Part(int(found[1]), int(found[2]))


def work(
    path: str | Path,
    part: Part,
    *,
    device: str | None = None,
    patience: float = PATIENCE_SECONDS,
    progress: Callable[[Progress], None] | None = None,
    say: Say = lambda _: None,
) -> WorkReport:
    """Carry out a part of a plan, going on from what any attempt at it did; its files are written when this returns.

    Args:
        path: of the plan's file.
        part: which.
        device: where to compute; None: as the plan says. The bytes do not depend on it.
        patience: seconds without a sign of the others after which their part of a phase is done here.
        progress: is told how far this part is.
        say: is told in sentences what is waited for.

    Raises:
        SourceChangedError: the source is not the one planned with. CheckpointError: the plan cannot be carried out.
        NonFiniteError, BudgetError, SelectionError: as in ``run``.
    """
    job = Job(Path(path), device)
    with Attempt(job.file.journals, job.file.hash, str(part)) as attempt:
        return _Worker(job, part, attempt, patience, progress, say).run()


def run_chunks(
    job: Job, part: Part, attempt: Attempt, done: Callable[[Chunk], None] | None = None, *, seals: bool = True
) -> int:
    """Do what is missing of a part of the phase at hand; ``seals``: see ``ChunkWork``. Returns the number of chunks."""
    chunks = [c for c in part.of(job.chunks) if not job.is_done(c)]
    ChunkWork(job, attempt, done, seals=seals).run(chunks)
    return len(chunks)


class _Worker:
    def __init__(
        self,
        job: Job,
        part: Part,
        attempt: Attempt,
        patience: float,
        progress: Callable[[Progress], None] | None,
        say: Say,
    ) -> None:
        self.job, self.part, self.attempt = job, part, attempt
        self._patience, self._progress, self._say = patience, progress, say
        self._done = self._reused = self._taken_over = self._bytes = 0

    def run(self) -> WorkReport:
        last = False
        if self.job.phase == "seal":
            self._reused = len(self.part.of(self.job.written))
        while not last and self.job.phase != "seal":
            last = self.job.phase == "write"
            mine = self.part.of(self.job.chunks)
            self._reused += sum(map(self.job.is_done, mine))
            self._done += run_chunks(self.job, self.part, self.attempt, self._told)
            if not last:
                self._wait()
        return WorkReport(self.part, self._done, self._reused, self._taken_over)

    def _told(self, chunk: Chunk) -> None:
        if self._progress is not None:
            self._bytes += chunk.nbytes
            total = self.job.bytes_done()[1] // self.part.count
            self._progress(Progress(min(self._bytes, total), total, chunk.name))

    def _wait(self) -> None:
        """Return when the phase is complete, by others or, when they give no sign, by this worker."""
        phase, heard = self.job.phase, time.monotonic()
        tell = heard + _FIRST_WORD_SECONDS
        while True:
            mine = self.attempt.path.name
            before = {n: a.offset for n, a in self.job.journals.attempts.items() if n != mine}
            self.job.update()
            if self.job.phase != phase:
                return
            now = time.monotonic()
            if any(a.offset > before.get(n, 0) for n, a in self.job.journals.attempts.items() if n != mine):
                heard = now
            if now - heard >= self._patience:
                self._take_over()
                continue
            if now >= tell:
                tell = now + _TELL_SECONDS
                missing, whole = len(self.job.missing()), len(self.job.chunks)
                left = self._patience - (now - heard)
                self._say(
                    f"waiting for other parts: {whole - missing} of {whole} pieces of the phase '{phase}' are done; "
                    f"with no sign of them for another {left:.0f} s this part does them"
                )
            time.sleep(min(_LOOK_SECONDS, self._patience / 10))

    def _take_over(self) -> None:
        chunks = self.job.missing()
        self._say(f"no other part gives a sign: doing its {len(chunks)} pieces of the phase '{self.job.phase}'")
        ChunkWork(self.job, self.attempt, self._told).run(chunks)
        self._done += len(chunks)
        self._taken_over += len(chunks)
