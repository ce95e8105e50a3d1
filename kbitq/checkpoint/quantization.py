"""``run``: carries a plan out. The final name appears only when everything under it is complete and on the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.passes.cpu_pipeline import CpuPipeline
from kbitq.checkpoint.passes.device_pipeline import DevicePipeline
from kbitq.checkpoint.passes.devices import resolve_devices
from kbitq.checkpoint.passes.finish import finish_folder
from kbitq.checkpoint.passes.journal import Journal
from kbitq.checkpoint.passes.pipeline import Pipeline
from kbitq.checkpoint.passes.resume import take_up
from kbitq.checkpoint.passes.run_state import ErrorSums, RunState
from kbitq.checkpoint.passes.scan_pass import scan_pass
from kbitq.checkpoint.passes.settle_pass import settled
from kbitq.checkpoint.passes.spool import Spool
from kbitq.checkpoint.passes.write_pass import WritePass
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.totals import LedgerRow, kept_row, quantized_row, totals
from kbitq.checkpoint.source.memory import tile_bytes
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.errors import CheckpointError, KbitqError, SourceChangedError
from kbitq.quantized import sqnr_db


@dataclass
class RunReport:
    """What a run did.

    Attributes:
        out: the file or folder it made.
        totals: sums over the tensors, with ``inspect``'s keys.
        tensors: a row each, with ``inspect``'s keys.
        seconds: it took.
        notes: sentences about what was not carried over, and about statistics that this run could not use as usual.
        fit_gain_db: what fitting codebooks gained over ``optimal``, in dB, where this run fitted any.
        reused: how many tensors an interrupted run had already written, and how many it had scanned.
    """

    out: Path
    totals: dict[str, Any]
    tensors: list[LedgerRow]
    seconds: float
    notes: list[str]
    fit_gain_db: float | None = None
    reused: tuple[int, int] = (0, 0)


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
    devices = resolve_devices(plan.device)
    with Staging(plan.out) as staging, ExitStack() as held:
        state, journal = take_up(plan, staging)
        held.callback(journal.close)
        reused = len(state.tensors), len(state.scans)
        try:
            plan, gain, notes = _write_weights(plan, devices, staging, state, journal, progress)
            report = run_report(plan, state.tensors, time.monotonic() - started)
            report = replace(report, notes=[*report.notes, *notes], fit_gain_db=gain, reused=reused)
            if plan.to_folder:
                finish_folder(plan, staging, report.totals, report.tensors, state.digests)
            else:
                staging.publish_file(plan.shards[0].name)
        except BaseException as error:
            if not journal.holds_work or not _resumable(error):
                staging.discard()
            elif not state.wrote:
                staging.clear_output()  # room that was taken and not used: a full disk needs it back
            raise
    return report


def _write_weights(
    plan: Plan,
    devices: tuple[str, ...],
    staging: Staging,
    state: RunState,
    journal: Journal,
    progress: Callable[[Progress], None] | None,
) -> tuple[Plan, float | None, list[str]]:
    """Both passes. Returns the plan as it was carried out, what fitting gained, and notes on the statistics."""
    on_cpu = devices == ("cpu",)
    tile = tile_bytes(plan.options.max_memory, torch.get_num_threads() if on_cpu else None)
    with ExitStack() as held:
        held.enter_context(journal.settled())
        spool = held.enter_context(Spool(staging.folder)) if plan.spool_bytes else None
        plan = spool.over(plan) if spool else plan
        reader = held.enter_context(TileReader(plan.checkpoint, tile))
        pipeline: Pipeline = CpuPipeline(reader) if on_cpu else DevicePipeline(reader, devices)
        selected = sum(t.bytes_in for t in plan.tensors if t.quantized)
        meter = ProgressMeter(progress, selected * (2 if plan.settles else 1) + plan.bytes_in)
        staging.check_space(plan.disk_needed)  # now, and again after the first pass, which may have kept tensors whole
        if spool is None:
            plan = settled(scan_pass(plan, pipeline, state, journal, meter), reader, meter)
            staging.check_space(plan.disk_needed)
        writing = WritePass(plan, pipeline, staging, state, journal, meter, spool)
        writing.run()
        reader.check_unchanged()
        return plan, writing.fit_gain_db, writing.notes


def _resumable(error: BaseException) -> bool:
    """Whether the same command may get further next time."""
    if isinstance(error, SourceChangedError):
        return False
    return isinstance(error, CheckpointError) or not isinstance(error, KbitqError)


def run_report(plan: Plan, found: Mapping[str, ErrorSums | None], seconds: float) -> RunReport:
    """The report of a run: ``found`` are the error sums of every quantized tensor, by name."""
    metas = {n: m for s in plan.shards if s.meta is not None for n, m in s.meta.tensors.items()}
    rows = [
        quantized_row(t.name, metas[t.name], t.reason)
        if t.quantized
        else kept_row(t.name, t.reason, t.shape, t.dtype, t.bytes_out)
        for t in plan.tensors
    ]
    in_order = [sums for t in plan.tensors if t.quantized and (sums := found[t.name]) is not None]
    overall = sqnr_db(sum(s.signal for s in in_order), sum(s.noise for s in in_order))
    return RunReport(plan.out, totals(rows, plan.bytes_stored, overall), rows, seconds, plan.notes)
