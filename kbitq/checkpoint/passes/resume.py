"""Whether what an interrupted run left is of this run, and can be gone on from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbitq.checkpoint.passes.journal import Done, Journal
from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.errors import CheckpointError
from kbitq.format import BLOCK, element_count, matrix_shape


def check_key(journal: Journal, key: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError where a journal belongs to a run with another source or other options."""
    old = journal.done.key
    if old is None or old == key:
        return
    what = next((_difference(name, old.get(name), key.get(name)) for name in key if old.get(name) != key.get(name)), "")
    raise CheckpointError(
        f"{folder} is the unfinished output of another run: {what or 'it was made by another version'}",
        hint="repeat that run to finish it, or start over with force=True",
        remedy="start-over",
    )


def _difference(name: str, old: Any, new: Any) -> str:
    """Says what differs: an option with both values, a file of the source by name."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [k for k in {**old, **new} if old.get(k) != new.get(k)]
        if name == "source":
            return f"{keys[0]} of the source has changed since"
        return f"{keys[0]} was {old.get(keys[0])!r} and is now {new.get(keys[0])!r}"
    return f"{name} was {old!r} and is now {new!r}"


def makes_sense(done: Done, plan: Plan) -> bool:
    """Whether a journal speaks of this plan's tensors and of places in them.

    Checksums find damage; this finds what a run of the plan would not have written, so that nothing is read or written
    at a place that a journal made up.
    """
    tensors = {t.name: t for t in plan.tensors}
    if not all(name in tensors and _scan_fits(scan, tensors[name]) for name, scan in done.scans.items()):
        return False
    if done.scanning is not None:
        name, place, scan = done.scanning
        if name not in tensors or not _scan_fits(scan, tensors[name]) or not _at_block(place, tensors[name]):
            return False

    def quantized(name: str) -> bool:
        return tensors[name].quantized and name in done.scans and not done.scans[name].nonfinite

    if done.partial is not None:
        name, place, sums = done.partial
        if name not in tensors or quantized(name) != (sums is not None):
            return False
        as_matrix = quantized(name) or plan.checkpoint.tensors[name].scaling is not None
        if not (_at_block(place, tensors[name]) if as_matrix else 0 < place < tensors[name].bytes_in):
            return False
    return all(name in tensors and quantized(name) == (sums is not None) for name, sums in done.tensors.items())


def _scan_fits(scan: Scan, tensor: TensorPlan) -> bool:
    count = element_count(tensor.shape)
    return (
        tensor.quantized
        and math.isfinite(scan.amax)
        and scan.amax >= 0
        and 0 <= scan.nonfinite <= count
        and (0 <= scan.first < count if scan.nonfinite else scan.first == -1)
    )


def _at_block(element: int, tensor: TensorPlan) -> bool:
    """Whether an element is inside a tensor's matrix, with a block beginning there."""
    rows, cols = matrix_shape(tensor.name, tensor.shape)
    return 0 < element < rows * cols and element % cols % BLOCK == 0
