"""What a plan refuses of an output in another tool's format: options that it has no place for, tensors, memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kbitq.checkpoint.output.destination import is_file_name
from kbitq.checkpoint.plan.options import QuantizeOptions
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.memory import TILES_IN_USE
from kbitq.checkpoint.source.open import Checkpoint
from kbitq.codecs.base import OutputCodec, output_codec
from kbitq.errors import SelectionError
from kbitq.text_safety import shown

_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # model types whose layers are Conv1D
_WHY = {
    "importance": "its scales leave no choice to weigh",
    "calibration": "error feedback is for integers",
    "budget": "it has one K for all tensors, which a budget cannot choose from",
    "rules": "it has one K for all tensors",
}
_INSTEAD = {
    "importance": "compressed-tensors, gptq and kbitq's own format take it",
    "calibration": "compressed-tensors, gptq, int8 and kbitq's own format take it",
    "budget": "compressed-tensors has 4 and 8 bits to choose from, kbitq's own format 2 to 8",
    "rules": "compressed-tensors and kbitq's own format take a K by rule; a rule may keep tensors in every format",
}


def check_format(where: str, tensors: Sequence[TensorPlan], options: QuantizeOptions) -> None:
    """Raise SelectionError for what the output's format cannot hold, where it is another tool's."""
    output = output_codec(options.codec)
    if output is None:
        return
    _check_options(output, options)
    for tensor in tensors:
        if tensor.quantized and (reason := output.refusal(tensor.name, tensor.shape)) is not None:
            raise SelectionError(
                f"{where}: tensor {shown(tensor.name)} {reason}",
                hint="exclude it, and it is kept as it is",
                remedy="unfit",
                data={"tensor": tensor.name},
            )


def _check_options(output: OutputCodec, options: QuantizeOptions) -> None:
    mixed = any(rule.k not in (None, options.k) for rule in options.rules)
    given = {
        "importance": options.importance is not None,
        "calibration": options.calibration is not None,
        "budget": options.budget is not None,
        "rules": mixed and len(output.ks) > 1,
    }
    if wrong := next((name for name, there in given.items() if there and name not in output.takes), None):
        said = f"{wrong} cannot be used for the format {output.output}: {_WHY[wrong]}"
        raise SelectionError(said, hint=_INSTEAD[wrong])
    if any(rule.codec is not None for rule in options.rules):
        raise SelectionError(f"rules cannot change the codec in the format {output.output}: it has its own")
    if options.device not in ("auto", "cpu"):
        raise SelectionError(f"the format {output.output} is made on the CPU, not on {options.device}")


def check_folder(checkpoint: Checkpoint, target: Path) -> None:
    """Raise SelectionError where the output would be one file, or where loaders would not find the weights.

    A source without a config.json is noted.
    """
    kind = (checkpoint.config or {}).get("model_type")
    if kind in _TRANSPOSED:
        raise SelectionError(
            f"{checkpoint.where}: models of type {kind} store weights [in, out], which is not for other tools' formats",
            hint="kbitq's own format takes them",
        )
    if is_file_name(target):
        raise SelectionError(f"{target} is a file, and other tools' formats need a folder, whose config.json says them")
    if checkpoint.config is None:
        checkpoint.notes.append("the source has no config.json: that of the output says only how weights are quantized")


def check_plan(plan: Plan) -> None:
    """Raise CodebookError or SelectionError for what only the whole plan tells: levels, calibration, memory."""
    assert plan.output is not None
    if plan.fits:
        plan.output.levels("fit", 0)  # raises: it has none that could be fitted
    for tensor in plan.tensors:
        if (known := plan.hessian(tensor)) is not None and known.transposed:
            said = f"is stored [in, out], which the format {plan.output.output} has no place for"
            raise SelectionError(f"tensor {shown(tensor.name)} {said}", hint="kbitq's own format takes it")
    bound, needed = plan.options.max_memory, TILES_IN_USE * plan.least_tile
    if bound is not None and needed > bound:
        raise SelectionError(
            f"blocks of rows take {needed / 1e6:,.0f} MB in this format, more than max_memory allows",
            hint="allow more, or choose a format whose scales are for one row",
            remedy="rows-memory",
        )
