"""``run``: carries a plan out. The final name appears only when everything under it is complete and on the disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.passes.device_pipeline import DevicePipeline
from kbitq.checkpoint.passes.finish import finish_folder
from kbitq.checkpoint.passes.journal import Journal
from kbitq.checkpoint.passes.resume import check_key, makes_sense
from kbitq.checkpoint.passes.run_state import ErrorSums
from kbitq.checkpoint.passes.scan_pass import scan_pass
from kbitq.checkpoint.passes.spool import Spool
from kbitq.checkpoint.passes.tile_codec import TileCodec, resolve_devices
from kbitq.checkpoint.passes.write_pass import WritePass
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.totals import kept_row, quantized_row, totals
from kbitq.checkpoint.source.memory import tile_bytes
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.errors import CheckpointError, KbitqError, SourceChangedError
from kbitq.format import FORMAT_VERSION
from kbitq.quantized import sqnr_db

# What the bytes of an output do not depend on, so that it may differ when a run is taken up again.
_FREE_OPTIONS = ("device", "force", "max_memory", "codebook", "min_coverage", "rules", "importance", "budget")


@dataclass
class RunReport:
    """What a run did. ``totals`` and ``tensors`` have ``inspect``'s keys; ``notes`` say what was not carried over.

    ``fit_gain_db``: what fitting codebooks gained over ``optimal``, in dB, where this run fitted any.
    """

    out: Path
    totals: dict[str, Any]
    tensors: list[dict[str, Any]]
    seconds: float
    notes: list[str]
    fit_gain_db: float | None = None


def run(plan: Plan, progress: Callable[[Progress], None] | None = None) -> RunReport:
    """Carry out a plan, going on from where an interrupted run of the same plan got.

    Interrupted (Ctrl-C, a full disk, a source that cannot be read for now), it keeps what it has in a hidden folder
    beside ``plan.out``; the same plan, run again, ends with the same bytes as a run in one go.

    Raises:
        NonFiniteError: a tensor to be quantized has NaN or infinite values (unless ``on_nonfinite`` is ``keep``).
        NoSpaceError: the disk is full. SourceChangedError: the source is not the one planned with.
        CheckpointError: the source cannot be read, or another run has the output or left it unfinished.
        BuildError: ``device`` names a GPU that is not there.
    """
    started = time.monotonic()
    devices = resolve_devices(plan.options.device)
    with Staging(plan.out) as staging, closing(_open_journal(plan, staging)) as journal:
        try:
            on_cpu = devices == ("cpu",)
            tile = tile_bytes(plan.options.max_memory, torch.get_num_threads() if on_cpu else None)
            with ExitStack() as held:
                held.enter_context(journal.settled())
                spool = held.enter_context(Spool(staging.folder)) if plan.spool_bytes else None
                plan = spool.over(plan) if spool else plan
                reader = held.enter_context(TileReader(plan.checkpoint, tile))
                codec = TileCodec(reader) if on_cpu else DevicePipeline(reader, devices)
                plan, sums, gain = _passes(plan, codec, staging, journal, progress, spool)
            report = replace(_report(plan, sums, time.monotonic() - started), fit_gain_db=gain)
            if plan.to_folder:
                finish_folder(plan, staging, report.totals, report.tensors, journal.done.files)
            else:
                staging.publish_file(plan.shards[0].name)
        except BaseException as error:
            if not journal.holds_work or not _resumable(error):
                staging.discard()
            elif not journal.done.tensors and journal.done.partial is None:
                staging.clear_output()  # room that was taken and not used: a full disk needs it back
            raise
    return report


def _passes(
    plan: Plan,
    codec: TileCodec,
    staging: Staging,
    journal: Journal,
    progress: Callable[[Progress], None] | None,
    spool: Spool | None,
) -> tuple[Plan, dict[str, ErrorSums], float | None]:
    selected = sum(t.bytes_in for t in plan.tensors if t.quantized)
    meter = ProgressMeter(progress, selected + plan.bytes_in)
    staging.check_space(plan.disk_needed)  # now, and again after the first pass, which may have kept tensors whole
    if spool is None:
        plan = scan_pass(plan, codec, journal, meter)
        staging.check_space(plan.disk_needed)
    writing = WritePass(plan, codec, staging, journal, meter, spool)
    sums = writing.run()
    codec.reader.check_unchanged()
    return plan, sums, writing.fit_gain_db


def _resumable(error: BaseException) -> bool:
    """Whether the same command may get further next time."""
    if isinstance(error, SourceChangedError):
        return False
    return isinstance(error, CheckpointError) or not isinstance(error, KbitqError)


def _open_journal(plan: Plan, staging: Staging) -> Journal:
    """The journal of this plan: an earlier run's, if there is one and it was of the same plan."""
    key = _run_key(plan)
    journal = Journal(staging.journal)
    try:
        if not plan.options.force:
            check_key(journal, key, staging.folder)
        if journal.done.key != key or not makes_sense(journal.done, plan):
            journal.close()
            staging.clear()
            journal = Journal(staging.journal)
            journal.add("run", key=key)
            journal.commit()
        return journal
    except BaseException:
        journal.close()
        raise


def _run_key(plan: Plan) -> dict[str, Any]:
    """Everything that the bytes of the output depend on, as JSON: source, options, format version."""
    options = {k: v for k, v in dataclasses.asdict(plan.options).items() if k not in _FREE_OPTIONS}
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    options["importance"] = plan.importance.sha256 if plan.importance is not None else None
    digests = {key: hashlib.sha256(levels.tobytes()).hexdigest() for key, (levels, _) in plan.levels.items()}
    for (_, k), digest in sorted(digests.items()):
        options[f"codebook of K={k}"] = digest[:16]
    # Rules and a budget come down to this; the K of a budget are found again, since measuring is deterministic.
    chosen = [
        (t.name, t.k, t.scale, t.k and (plan.codebook_name(t), digests.get((t.codebook, t.k)))) for t in plan.tensors
    ]
    options["choice of K, scale and codebook"] = hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:16]
    source: Mapping[str, Any] = {n: [f.size, f.token] for n, f in plan.checkpoint.fingerprints.items()}
    return {"format_version": FORMAT_VERSION, "options": options, "source": dict(source), "name": plan.out.name}


def _report(plan: Plan, sums: dict[str, ErrorSums], seconds: float) -> RunReport:
    metas = {n: m for s in plan.shards if s.meta is not None for n, m in s.meta.tensors.items()}
    rows = [
        quantized_row(t.name, metas[t.name], t.reason)
        if t.quantized
        else kept_row(t.name, t.reason, t.shape, t.dtype, t.bytes_out)
        for t in plan.tensors
    ]
    in_order = [sums[t.name] for t in plan.tensors if t.quantized]
    overall = sqnr_db(sum(s.signal for s in in_order), sum(s.noise for s in in_order))
    return RunReport(plan.out, totals(rows, plan.bytes_in, overall), rows, seconds, plan.notes)
