"""Taking up an interrupted run: whether what it left is of the same plan, and whether it makes sense."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.passes.journal import Journal
from kbitq.checkpoint.passes.run_state import RunState, Scan
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.codecs.base import coding_text, get_codec
from kbitq.errors import CheckpointError
from kbitq.format import DEFAULT_CODEC, FORMAT_VERSION, element_count, matrix_shape

# What the bytes of an output do not depend on, so that it may differ when a run is taken up again.
_FREE_OPTIONS = (
    "device", "force", "max_memory", "codebook", "min_coverage", "rules", "importance", "budget", "calibration",
)  # fmt: skip


def take_up(plan: Plan, staging: Staging, key: Mapping[str, Any] | None = None) -> tuple[RunState, Journal]:
    """The state of this plan's run, and its journal: an earlier run's if there is one of the same plan, or new ones.

    ``key`` tells the run from others; None: what the bytes of its output depend on.

    Raises CheckpointError where the folder holds the journal of another run, unless the plan's options say ``force``.
    """
    key, state = run_key(plan) if key is None else dict(key), RunState()
    journal = Journal(staging.journal, state)
    try:
        if not plan.options.force:
            _check_key(state, key, staging.folder)
        if state.key != key or not makes_sense(state, plan) or not _files_are_there(state, plan, staging):
            journal.close()
            staging.clear()
            state = RunState()
            journal = Journal(staging.journal, state)
            state.started(key)
            journal.commit()
        return state, journal
    except BaseException:
        journal.close()
        raise


def _files_are_there(state: RunState, plan: Plan, staging: Staging) -> bool:
    """Whether the files are here that the state calls written.

    They are not where an earlier run gave its output the final name and was stopped before it removed its journal. All
    files of a run are made before the first byte is written to one of them.
    """
    if not state.wrote:
        return True
    not_finite = {name: "" for name, scan in state.scans.items() if scan.nonfinite}
    return all((staging.output / shard.name).is_file() for shard in plan.with_kept(not_finite).shards)


def run_key(plan: Plan) -> dict[str, Any]:
    """Everything that the bytes of the output depend on, as JSON: source, options, format version."""
    options = {k: v for k, v in dataclasses.asdict(plan.options).items() if k not in _FREE_OPTIONS}
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    if options["codec"] == DEFAULT_CODEC:
        del options["codec"]  # as in the journals of versions that had no other
    options["importance"] = plan.importance.sha256 if plan.importance is not None else None
    if plan.statistics is not None:
        options["calibration"] = plan.statistics.fingerprint
    given = {key: levels for key, (levels, _) in plan.levels.items() if levels is not None}
    digests = {key: hashlib.sha256(levels.tobytes()).hexdigest() for key, levels in given.items()}
    for (_, k, codec), digest in sorted(digests.items()):
        options[f"codebook of {coding_text(codec, k)}"] = digest[:16]
    # Rules and a budget come down to this; the K of a budget are found again, since measuring is deterministic.
    chosen = [
        (t.name, t.k, t.scale, t.k and (plan.codebook_name(t), digests.get((t.codebook, t.k, t.codec))), *_codec_of(t))
        for t in plan.tensors
    ]
    options["choice of K, scale and codebook"] = hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:16]
    source: Mapping[str, Any] = {n: [f.size, f.token] for n, f in plan.checkpoint.fingerprints.items()}
    return {"format_version": FORMAT_VERSION, "options": options, "source": dict(source), "name": plan.out.name}


def _codec_of(tensor: TensorPlan) -> tuple[str, ...]:
    """Nothing for the default codec, as in the journals of versions that had no other."""
    return () if tensor.k is None or tensor.codec == DEFAULT_CODEC else (tensor.codec,)


def _check_key(state: RunState, key: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError where a state belongs to a run with another source or other options."""
    old = state.key
    if old is None or old == key:
        return
    names = (name for name in {**old, **key} if old.get(name) != key.get(name))
    what = next((_difference(name, old.get(name), key.get(name)) for name in names), "")
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


def makes_sense(state: RunState, plan: Plan) -> bool:
    """Whether a state speaks of this plan's tensors and of places in them.

    Checksums find damage in a journal. This finds what a run of the plan would not have recorded, so that nothing is
    read or written at a place that a forged journal made up.
    """
    tensors = {t.name: t for t in plan.tensors}
    if not all(name in tensors and _scan_fits(scan, tensors[name]) for name, scan in state.scans.items()):
        return False
    if (scanning := state.begun_scan) is not None:
        tensor = tensors.get(scanning.tensor)
        if tensor is None or not _scan_fits(scanning.found, tensor) or not _at_block(scanning.element, tensor):
            return False

    def quantized(name: str) -> bool:
        return tensors[name].quantized and name in state.scans and not state.scans[name].nonfinite

    if (begun := state.begun_tensor) is not None:
        name, position = begun.tensor, begun.position
        if name not in tensors or quantized(name) != (begun.error_sums is not None):
            return False
        as_matrix = quantized(name) or plan.checkpoint.tensors[name].scaling is not None
        if not (
            _at_block(position, tensors[name], written=True) if as_matrix else 0 < position < tensors[name].bytes_in
        ):
            return False
    return all(name in tensors and quantized(name) == (found is not None) for name, found in state.tensors.items())


def _scan_fits(scan: Scan, tensor: TensorPlan) -> bool:
    count = element_count(tensor.shape)
    return (
        tensor.quantized
        and math.isfinite(scan.amax)
        and scan.amax >= 0
        and 0 <= scan.nonfinite <= count
        and (0 <= scan.first < count if scan.nonfinite else scan.first == -1)
    )


def _at_block(element: int, tensor: TensorPlan, *, written: bool = False) -> bool:
    """Whether an element is inside a tensor's matrix, where its codec may cut it."""
    rows, cols = matrix_shape(tensor.name, tensor.shape)
    if written and tensor.rows_together > 1 and element % (tensor.rows_together * cols):
        return False
    return 0 < element < rows * cols and element % cols % get_codec(tensor.codec).cut == 0
