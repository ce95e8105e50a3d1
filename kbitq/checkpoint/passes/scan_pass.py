"""The first pass over the source: the largest magnitude of every tensor, and whether all of it is finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kbitq.checkpoint.passes.journal import Journal, scan_record
from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.passes.tile_codec import TileCodec
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.planner import check_worthwhile
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.errors import NonFiniteError


def scan_pass(plan: Plan, codec: TileCodec, journal: Journal, meter: ProgressMeter) -> Plan:
    """The first pass. Scans go to the journal; returns the plan without the tensors that are not finite.

    Raises NonFiniteError, or with ``on_nonfinite="keep"`` SelectionError where that leaves too little.
    """
    selected = [t for t in plan.tensors if t.quantized]
    scan_tensors(plan, selected, codec, journal, meter)
    found = journal.done.scans
    keep = {t.name: f"{found[t.name].nonfinite} values are not finite" for t in selected if found[t.name].nonfinite}
    plan = plan.with_kept(keep)
    check_worthwhile(plan.source, plan.tensors, plan.options)
    return plan


def scan_tensors(
    plan: Plan,
    tensors: list[TensorPlan],
    codec: TileCodec,
    journal: Journal,
    meter: ProgressMeter,
    sync: Callable[[], None] | None = None,
) -> None:
    """Scan those of ``tensors`` that the journal has no scan of. ``sync`` makes the data durable that it speaks of.

    Raises NonFiniteError, unless ``on_nonfinite`` is ``keep``.
    """
    for piece, found_here in codec.scanned(_to_scan(plan, tensors, codec.reader, journal, meter)):
        assert piece.span is not None
        begun = journal.done.scanning
        scan = begun[2] if begun is not None and begun[0] == piece.tensor.name else Scan()
        scan.add(found_here)
        meter.add(piece.count, piece.tensor.name)
        if piece.start + piece.count < piece.tensor.nbytes:
            after = piece.span.first_element + piece.span.numel
            journal.add("scanning", tensor=piece.tensor.name, next=after, found=scan_record(scan))
        elif scan.nonfinite and plan.options.on_nonfinite == "error":
            raise nonfinite_error(plan.checkpoint, piece.tensor, scan)
        else:
            journal.add("scan", tensor=piece.tensor.name, found=scan_record(scan))
        if journal.due(0):
            journal.begin_commit(sync)


def _to_scan(
    plan: Plan, selected: list[TensorPlan], reader: TileReader, journal: Journal, meter: ProgressMeter
) -> Iterator[Piece]:
    """What is left to scan: tensors without a scan, the one that was begun from where it was."""
    begun = journal.done.scanning
    for tensor in selected:
        if tensor.name in journal.done.scans:
            meter.add(tensor.bytes_in, tensor.name)
            continue
        start = begun[1] if begun is not None and begun[0] == tensor.name else 0
        source = plan.checkpoint.tensors[tensor.name]
        meter.add(start * source.stored_bits // 8, tensor.name)
        yield from reader.matrix_pieces(source, start)


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
