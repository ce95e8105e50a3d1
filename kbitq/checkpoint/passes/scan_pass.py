"""The first pass over the source: the largest magnitude of every tensor, and whether all of it is finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kbitq.checkpoint.passes.journal import Journal
from kbitq.checkpoint.passes.pipeline import Pipeline
from kbitq.checkpoint.passes.run_state import RunState, Scan
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.planner import check_worthwhile
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.codecs.base import get_codec
from kbitq.errors import NonFiniteError


def scan_pass(plan: Plan, pipeline: Pipeline, state: RunState, journal: Journal, meter: ProgressMeter) -> Plan:
    """The first pass: fills the scans of the state. Returns the plan that keeps the tensors that are not finite.

    Raises NonFiniteError, or with ``on_nonfinite="keep"`` SelectionError where that leaves too little.
    """
    selected = [t for t in plan.tensors if t.quantized]
    scan_tensors(plan, selected, pipeline, state, journal, meter)
    return without_nonfinite(plan, state.scans)


def without_nonfinite(plan: Plan, found: Mapping[str, Scan]) -> Plan:
    """The plan that keeps the tensors in which a scan found values that are not finite.

    Raises SelectionError where that leaves too little.
    """
    selected = [t for t in plan.tensors if t.quantized]
    keep = {t.name: f"{found[t.name].nonfinite} values are not finite" for t in selected if found[t.name].nonfinite}
    plan = plan.with_kept(keep)
    check_worthwhile(plan.source, plan.tensors, plan.options)
    return plan


def scan_tensors(
    plan: Plan,
    tensors: list[TensorPlan],
    pipeline: Pipeline,
    state: RunState,
    journal: Journal,
    meter: ProgressMeter,
    sync: Callable[[], None] | None = None,
) -> None:
    """Scan those of ``tensors`` that the state has no scan of. ``sync`` makes durable what was written before.

    Raises NonFiniteError, unless ``on_nonfinite`` is ``keep``.
    """
    for piece, found_here in pipeline.scanned(_left_to_scan(plan, tensors, pipeline.reader, state, meter)):
        assert piece.span is not None
        name = piece.tensor.name
        _, found = state.scan_so_far(name)
        found.add(found_here)
        meter.add(piece.count, name)
        if piece.start + piece.count < piece.tensor.nbytes:
            state.scan_reached(name, piece.span.first_element + piece.span.numel, found)
        elif found.nonfinite and plan.options.on_nonfinite == "error":
            raise nonfinite_error(plan.checkpoint, piece.tensor, found)
        else:
            state.scan_finished(name, found)
        if journal.due(0):
            journal.begin_commit(sync)


def _left_to_scan(
    plan: Plan, tensors: list[TensorPlan], reader: TileReader, state: RunState, meter: ProgressMeter
) -> Iterator[Piece]:
    """Tensors without a scan. The one that an earlier run began comes from where that run got."""
    begun = state.begun_scan
    for tensor in tensors:
        if tensor.name in state.scans:
            meter.add(tensor.bytes_in, tensor.name)
            continue
        start = begun.element if begun is not None and begun.tensor == tensor.name else 0
        source = plan.checkpoint.tensors[tensor.name]
        meter.add(start * source.stored_bits // 8, tensor.name)
        yield from reader.matrix_pieces(source, start, get_codec(tensor.codec).cut)


def nonfinite_error(checkpoint: Checkpoint, tensor: SourceTensor, scan: Scan) -> NonFiniteError:
    """The error of a tensor that cannot be quantized, with the first place that is not finite."""
    place = [int(i) for i in np.unravel_index(scan.first, tensor.shape)]
    return NonFiniteError(
        f"{checkpoint.describe(tensor)} has {scan.nonfinite:,} NaN or infinite "
        f"value{'s' if scan.nonfinite > 1 else ''}, the first at {place}; nothing was written",
        tensor=tensor.name,
        count=scan.nonfinite,
        first=scan.first,
        hint="on_nonfinite='keep' copies such tensors unquantized, a pattern in exclude leaves them alone",
        remedy="nonfinite",
    )
