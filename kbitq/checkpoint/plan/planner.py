"""``plan_quantize``: from a source and options to a plan, with all that can be refused early refused here.

Nothing here reads tensor data or imports torch, so a plan is cheap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kbitq.calibration.statistics import Hessian, Statistics
from kbitq.checkpoint.output.destination import check_destination, default_output, is_file_name
from kbitq.checkpoint.output.staging import remove_leftovers
from kbitq.checkpoint.plan.options import QuantizeOptions, check_options
from kbitq.checkpoint.plan.other_formats import check_folder, check_format, check_plan
from kbitq.checkpoint.plan.plan import Plan, given_levels
from kbitq.checkpoint.plan.tensor_plan import TensorPlan, plan_tensor
from kbitq.checkpoint.source.open import Checkpoint
from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.side_files import REPORT_FILE
from kbitq.checkpoint.source.storage import Storage
from kbitq.choose.importance import Importance, load_importance
from kbitq.codecs.base import output_codec
from kbitq.errors import SelectionError
from kbitq.format import element_count

_INCLUDE = "a pattern in include adds tensors"


def plan_quantize(
    source: str | Path | Storage, out: str | Path | None, options: QuantizeOptions, *, dry: bool = False
) -> Plan:
    """Plan a run. Reads headers, index and config only.

    Args:
        source: a file, a folder, or a storage.
        out: the output, a file if the name ends in ``.safetensors``; None: a name beside the source.
        options: how to quantize.
        dry: only to look at: whether ``out`` is free is left to ``check_output``.

    Raises:
        CheckpointError: the source cannot be used, or ``out`` does not fit it; OutputExistsError where ``out`` exists.
        SelectionError: a pattern matches nothing, K is out of range, or nothing would be quantized.
        CodebookError: the codebook file does not hold ``2^K`` levels.
        ImportanceError: the importance file cannot be used.
    """
    check_options(options)
    selection = options.selection()
    checkpoint = open_source(source)
    selection.check_patterns(checkpoint.tensors)
    tensors = [plan_tensor(selection, t, options) for t in checkpoint.tensors.values()]
    check_worthwhile(checkpoint.where, tensors, options)
    check_format(checkpoint.where, tensors, options)
    _check_every_k(tensors, options)
    other = output_codec(options.codec) is not None
    label = _label(tensors, options)
    target = Path(out) if out is not None else default_output(checkpoint.storage, label, folder=other)
    importance = _importance(checkpoint, tensors, options)
    statistics = _statistics(checkpoint, tensors, options)
    if other:
        check_folder(checkpoint, target)
    plan = Plan(checkpoint, target, options, tensors, given_levels(tensors), importance, statistics=statistics)
    _check_feedback_fits(plan)
    if other:
        check_plan(plan)
    if not dry:
        if not options.force:  # with it, a run takes such a folder over
            remove_leftovers(target)
        check_output(plan)
    _ = plan.shards  # laid out now, so that a plan that cannot be written is refused before work starts
    return plan


def check_output(plan: Plan) -> None:
    """Raise OutputExistsError where the plan's output is taken, CheckpointError where it does not fit the source."""
    force, is_file = plan.options.force, is_file_name(plan.out)
    check_destination(plan.checkpoint, plan.out, force, is_file=is_file, marker=REPORT_FILE)


def _check_every_k(tensors: Sequence[TensorPlan], options: QuantizeOptions) -> None:
    """Raise SelectionError unless something says the K of every tensor to be quantized."""
    if options.k is None and options.budget is None:
        for tensor in tensors:
            if tensor.quantized and not tensor.pinned:
                raise SelectionError(
                    f"nothing says the K of {tensor.name}", hint="k is for what no rule gives a K", remedy="k"
                )


def _label(tensors: Sequence[TensorPlan], options: QuantizeOptions) -> str:
    """What the default output's name says of a run."""
    output = output_codec(options.codec)
    name = options.codec if output is not None else "kbitq"
    if options.budget is not None:
        wanted = f"{options.budget.bpw:g}bpw" if options.budget.bpw is not None else f"{options.budget.size}bytes"
        return f"{name}-{wanted}"
    if output is not None and len(output.ks) == 1:
        return name
    ks = {t.k for t in tensors if t.k is not None}
    return f"{name}-k{options.k if options.k is not None else ''.join(map(str, sorted(ks)))}"


def _importance(checkpoint: Checkpoint, tensors: Sequence[TensorPlan], options: QuantizeOptions) -> Importance | None:
    """The importance of the columns; what has no entry is noted."""
    if options.importance is None:
        return None
    importance = load_importance(options.importance)
    chosen = [t for t in tensors if t.quantized]
    missing = [t.name for t in chosen if importance.of(t.name, t.shape) is None]
    if len(missing) == len(chosen):
        raise SelectionError(
            f"{options.importance} has an entry for none of the {len(chosen)} tensors to be quantized",
            hint="entries bear the names of the model's weights; the inputs of weights stored [in, out] are no columns",
        )
    if missing:
        where = Path(options.importance).name
        checkpoint.notes.append(f"no entry in {where}, so all columns count the same: {_some(missing)}")
    return importance


def _statistics(checkpoint: Checkpoint, tensors: Sequence[TensorPlan], options: QuantizeOptions) -> Statistics | None:
    """The statistics of a calibration; what has none is noted. They are read when a tensor's turn comes."""
    if options.calibration is None:
        return None
    if options.importance is not None:
        raise SelectionError("importance and calibration do not go together: error feedback has weights of its own")
    statistics = Statistics.open(options.calibration)
    chosen = [t for t in tensors if t.quantized]
    missing = [t.name for t in chosen if statistics.of(t.name, t.shape) is None]
    if len(missing) == len(chosen):
        raise SelectionError(
            f"{options.calibration} has nothing on any of the {len(chosen)} tensors to be quantized",
            hint=f"these are the statistics of another model, or of this one under other names: {statistics.names[0]}",
        )
    if missing:
        checkpoint.notes.append(f"the calibration has nothing on these, which get no error feedback: {_some(missing)}")
    if scarce := [text for t in chosen if (text := _scarce(statistics.of(t.name, t.shape), t.name))]:
        checkpoint.notes.append(
            "the calibration has fewer tokens than columns for these, so only the diagonal of H counts and no error is "
            f"fed back: {_some(scarce)}"
        )
    return statistics


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _scarce(found: Hessian | None, name: str) -> str:
    """The name of a tensor, with how many experts of it, for which too few tokens were seen; empty where none were."""
    count = len(found.scarce()) if found is not None else 0
    if found is None or not count:
        return ""
    return f"{name} ({count} of {found.experts} experts)" if found.experts > 1 else name


def _check_feedback_fits(plan: Plan) -> None:
    """Raise SelectionError where error feedback needs more memory than is allowed, with the smallest tiles."""
    bound, needed = plan.options.max_memory, plan.feedback_bytes(0)
    if bound is not None and bound < needed:
        raise SelectionError(
            f"error feedback takes at least {needed / 1e6:,.0f} MB for the widest tensor, more than max_memory allows",
            remedy="memory",
        )


def check_worthwhile(where: str, tensors: Sequence[TensorPlan], options: QuantizeOptions) -> None:
    """Raise SelectionError for a run that would only copy, or leave more unquantized than ``min_coverage`` allows."""
    chosen = sum(element_count(t.shape) for t in tensors if t.quantized)
    parameters = sum(element_count(t.shape) for t in tensors)
    weights: Counter[str] = Counter()
    for tensor in tensors:
        if not tensor.quantized:
            weights[tensor.reason] += element_count(tensor.shape)
    listed = ", ".join(f"kept: {reason} ({count:,} parameters)" for reason, count in weights.most_common(3))
    if not chosen:
        raise SelectionError(f"{where}: no tensor would be quantized; {listed}", hint=_INCLUDE, remedy="include")
    if chosen < options.min_coverage * parameters:
        raise SelectionError(
            f"{where}: only {chosen / parameters:.1%} of the parameters would be quantized, less than the "
            f"{options.min_coverage:.1%} asked for; {listed}",
            hint=_INCLUDE,
            remedy="include",
        )
