"""What ``quantize`` and ``plan`` are asked to do: their one list of options, and what it comes to with a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kbitq.cli.options import arguments, budget, coding, hub, parsing, rules, selection
from kbitq.cli.options.output import Force, MaxShardSize, Output
from kbitq.format import DEFAULT_CODEC, QUANT_METHOD, with_scale_block

if TYPE_CHECKING:
    from kbitq.checkpoint import Plan, QuantizeOptions
    from kbitq.choose.knapsack import Budget
    from kbitq.choose.recipe import Recipe

GROUPED_FORMATS = ("compressed-tensors", "gptq")
ONLY_K = {"int8": 8, "fp8": 8, "fp8-block": 8, "bnb-nf4": 4, "bnb-nf4-double": 4}
"""Formats that have one K, which need not be said."""

_DEFAULTED = "DEFAULT"  # name of the source of a parameter that was not given
_WISHES = ("k", "bpw", "size")
_BUDGET = ("bpw", "size", "error", "weight", "tie", "sample")
_LISTS = ("include", "exclude", "only")
_AS_IT_IS = (
    "k", "scale", "codebook", "importance", "calibration", "device", "max_memory", "keep_embeddings", "on_nonfinite",
    "min_coverage", "max_shard_size", "force",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """The options that say how to quantize. Their order is that of the help page."""

    source: arguments.Source
    k: coding.K = None
    output: Output = None
    scale: coding.Scale = "mse"
    codebook: coding.Codebook = "optimal"
    codec: coding.Codec = DEFAULT_CODEC
    scale_block: coding.ScaleBlock = "32"  # type: ignore[assignment]  # parsed by the option
    format: coding.Format = QUANT_METHOD
    group: coding.Group = ""
    importance: coding.Importance = None
    calibration: coding.Calibration = None
    device: coding.Devices = "auto"
    max_memory: coding.MaxMemory = None
    include: selection.Include = None
    exclude: selection.Exclude = None
    only: selection.Only = None
    on_nonfinite: selection.OnNonfinite = "error"
    min_coverage: selection.MinCoverage = "0%"  # type: ignore[assignment]  # parsed by the option
    keep_embeddings: selection.KeepEmbeddings = True
    bpw: budget.Bpw = None
    size: budget.Size = None
    error: budget.Error = "auto"
    weight: budget.Weight = None
    tie: budget.Tie = None
    sample: budget.Sample = False
    rule: rules.Rule = None
    recipe: rules.Recipe = None
    write_recipe: rules.WriteRecipe = None
    stream: hub.Stream = False
    max_shard_size: MaxShardSize = "5GB"  # type: ignore[assignment]  # parsed by the option
    force: Force = False


def options_of(request: Request, context: typer.Context, kl: float | None = None) -> QuantizeOptions:
    """The options of a run. What the command line does not give, the recipe may; its rules come after those given.

    ``kl``: the divergence that stands in the place of a budget; then the options have the largest budget.
    """
    from kbitq.checkpoint import QuantizeOptions
    from kbitq.choose.knapsack import MOST_BITS
    from kbitq.choose.recipe import Recipe, load_recipe, parse_rule

    recipe = load_recipe(request.recipe) if request.recipe is not None else Recipe()
    given = _with_recipe(request, recipe, context)
    if kl is not None and given["format"] != QUANT_METHOD:
        raise typer.BadParameter("--kl is for kbitq's own format; --bpw goes with --format compressed-tensors too.")
    _settle_format(given)
    wishes = [f"--{key}" for key in _WISHES if given[key] is not None] + (["--kl"] if kl is not None else [])
    if len(wishes) > 1:
        raise typer.BadParameter(f"{' and '.join(wishes)} cannot go together.")
    chosen = (*map(parse_rule, given["rule"] or ()), *recipe.rules)
    if not wishes and not chosen:
        raise typer.BadParameter("Missing option '--k' (or --bpw, --size, --rule or --recipe).")
    if kl is not None:
        given["bpw"] = MOST_BITS
    _check_importance(recipe.importance, given["importance"])
    _check_calibration(recipe.calibration, given["calibration"])
    plain: dict[str, Any] = {key: given[key] for key in _AS_IT_IS}
    plain["codec"] = codec_of(given["codec"], given["scale_block"])
    parsing.check_k(plain["k"], plain["codec"])
    lists: dict[str, Any] = {key: tuple(given[key] or ()) for key in _LISTS}
    return QuantizeOptions(**plain, **lists, rules=chosen, budget=_budget(given))


def _settle_format(given: dict[str, Any]) -> None:
    """The codec, and the K where the format has only one, that --format and --group come to."""
    wanted, group = given["format"], given["group"]
    if group and wanted not in GROUPED_FORMATS:
        raise typer.BadParameter(f"--group goes with --format {' or '.join(GROUPED_FORMATS)}.")
    if wanted == QUANT_METHOD:
        return
    if given["codec"] != DEFAULT_CODEC or given["write_recipe"] is not None:
        other = "--codec" if given["codec"] != DEFAULT_CODEC else "--write-recipe"
        raise typer.BadParameter(f"{other} is for kbitq's own format, not for --format {wanted}.")
    given["codec"] = f"{wanted}-{group}" if group else wanted
    parsing.check_codec(given["codec"], group)
    if given["k"] is None and wanted in ONLY_K:
        given["k"] = ONLY_K[wanted]


def codec_of(codec: str, scale_block: int) -> str:
    """The codec that two options name."""
    return codec if codec == "auto" else with_scale_block(codec, scale_block)


def _with_recipe(request: Request, recipe: Recipe, context: typer.Context) -> dict[str, Any]:
    """Every option by name, those that the command line does not give from the recipe."""
    given = dict(vars(request))
    for key, value in recipe.options.items():
        source = context.get_parameter_source(key)
        if key in given and source is not None and source.name == _DEFAULTED:
            given[key] = value
    return given


def _budget(given: dict[str, Any]) -> Budget | None:
    from kbitq.choose.knapsack import Budget

    bpw, size, error, weight, tie, sample = (given[key] for key in _BUDGET)
    if bpw is None and size is None:
        return None
    return Budget(bpw, size, error, tuple(map(parsing.factor, weight or ())), tuple(tie or ()), sample)


def _check_importance(wanted: str | None, given: Path | None) -> None:
    """A recipe made with an importance file needs that file for the same bytes."""
    if wanted is None:
        return
    from kbitq.choose.importance import load_importance
    from kbitq.errors import ImportanceError

    if given is None or load_importance(given).sha256 != wanted:
        raise ImportanceError(
            f"the recipe was made with the importance file whose SHA-256 is {wanted}", hint="--importance FILE gives it"
        )


def _check_calibration(wanted: str | None, given: Path | None) -> None:
    """A recipe made with a calibration needs it for the same bytes."""
    if wanted is None:
        return
    from kbitq.calibration.statistics import Statistics
    from kbitq.errors import CalibrationError

    if given is None or Statistics.open(given).fingerprint != wanted:
        raise CalibrationError(
            f"the recipe was made with the statistics whose fingerprint is {wanted}",
            hint="--calibration DIR gives them",
        )


def finished(plan: Plan, recipe: Path | None) -> Plan:
    """The plan with its budget spent. That its recipe can be written is found out before."""
    from kbitq import checkpoint
    from kbitq.checkpoint.plan.recipe import check_recipe_file
    from kbitq.cli.console import console

    if recipe is not None:
        check_recipe_file(plan, recipe)
    if plan.options.budget is not None:
        with console.progress("measuring") as progress:
            plan = checkpoint.choose(plan, progress)
    return plan


def write_recipe(plan: Plan, path: Path | None) -> None:
    """Write the recipe where that is asked for: after the run, so that a run can be repeated that was interrupted."""
    from kbitq import checkpoint
    from kbitq.cli.console import console

    if path is not None:
        checkpoint.write_recipe(plan, path)
        console.note(f"the recipe is in {path}")
