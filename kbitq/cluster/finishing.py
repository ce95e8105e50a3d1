"""``finish``: what follows when all parts are written: headers, checksums, the other files, the final name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kbitq.checkpoint.passes.finish import finish_folder
from kbitq.checkpoint.passes.levels import mean_gain_db
from kbitq.checkpoint.passes.run_state import ErrorSums
from kbitq.checkpoint.plan.planner import check_output
from kbitq.checkpoint.quantization import RunReport, run_report
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.side_files import WEIGHTS_SUFFIX
from kbitq.cluster.attempts import Attempt
from kbitq.cluster.chunks import Part
from kbitq.cluster.job import Job
from kbitq.cluster.pages import removed
from kbitq.cluster.results import sealed_of
from kbitq.cluster.worker import run_chunks
from kbitq.errors import CheckpointError


def finish(path: str | Path, *, progress: Callable[[Progress], None] | None = None) -> RunReport:
    """Complete and publish the output of a plan whose parts are all written. Seals the files that are not sealed yet.

    Args:
        path: of the plan's file.
        progress: is told how far sealing is.

    Raises:
        CheckpointError: parts are missing, or the final name was taken meanwhile.
    """
    return finish_job(Job(Path(path)), progress)


def finish_job(job: Job, progress: Callable[[Progress], None] | None = None) -> RunReport:
    """The same for a job that is at hand."""
    started = time.monotonic()
    job.staging.take_back()
    job.update()
    if job.phase != "seal":
        missing = len(job.missing())
        raise CheckpointError(
            f"{job.file.out} cannot be finished: {missing} of {len(job.chunks)} pieces of the phase '{job.phase}' are "
            f"missing{_unfinished_parts(job)}",
            hint="do every part of the plan first; what is done is not done again",
            remedy="work",
            data={"path": job.file.path},
        )
    meter = ProgressMeter(progress, sum(c.nbytes for c in job.missing()))
    if job.missing():
        with Attempt(job.file.journals, job.file.hash, "finish") as attempt:
            run_chunks(job, Part(), attempt, lambda chunk: meter.add(chunk.nbytes, chunk.name))
        job.update()
    return _publish(job, started)


def _publish(job: Job, started: float) -> RunReport:
    plan, staging = job.plan, job.staging
    digests: dict[str, str] = {}
    sums: dict[str, ErrorSums | None] = {}
    for chunk in job.chunks:
        digests[chunk.name], found = sealed_of(job.result(chunk))
        sums.update(found)
    for shard in plan.shards:
        assert shard.meta is not None
        for name, meta in shard.meta.tensors.items():
            made = sums.get(name)
            if made is None:
                raise CheckpointError(f"the journals of {job.file.path} say nothing of {name}", remedy="plan-again")
            meta.sqnr_db, meta.max_abs_err = made.sqnr_db, made.max_abs_err
    report = run_report(plan, sums, time.monotonic() - started)
    report.fit_gain_db = mean_gain_db(plan, job.gains)
    if not all((staging.output / shard.name).is_file() for shard in plan.shards):
        return _was_published(job, report)
    for shard in plan.shards:
        if (staging.output / shard.name).stat().st_size != shard.nbytes:
            raise removed(staging.output / shard.name)
    check_output(plan)
    staging.needed = [shard.name for shard in plan.shards]
    names = set(staging.needed)
    for stale in staging.output.glob(f"*{WEIGHTS_SUFFIX}"):  # of a layout that values which are not finite have changed
        if stale.name not in names:
            stale.unlink()
    if plan.to_folder:
        finish_folder(plan, staging, report.totals, report.tensors, digests)
    else:
        staging.publish_file(plan.shards[0].name)
    return report


def _was_published(job: Job, report: RunReport) -> RunReport:
    """An earlier ``finish`` gave the output its name and was cut before it had tidied up."""
    if not job.file.out.exists():
        missing = (job.staging.output / shard.name for shard in job.plan.shards)
        raise removed(next(path for path in missing if not path.is_file()))
    job.staging.discard()
    return report


def _unfinished_parts(job: Job) -> str:
    """The parts that were begun last, for the message: ', of parts such as 2/4'."""
    begun = Counter(a.part for a in job.journals.attempts.values() if "/" in a.part)
    counts = Counter(part.partition("/")[2] for part in begun)
    if not counts:
        return ""
    count = int(counts.most_common(1)[0][0])
    if not 0 < count <= 1 << 20:
        return ""
    late = [str(Part(i, count)) for i in range(count) if any(not job.is_done(c) for c in Part(i, count).of(job.chunks))]
    return f", of part{'s' if len(late) > 1 else ''} {', '.join(late[:5])}{' and others' if len(late) > 5 else ''}"
