"""Options that choose K, scale and codebook tensor by tensor, and what they come to together with a recipe.

Like options.py this file must stay cheap to import.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kbitq.cli.views.text import parse_size

if TYPE_CHECKING:
    from kbitq.checkpoint import Plan, QuantizeOptions

_BUDGET = "A budget instead of one K"
_RULES = "Rules"
_DEFAULTED = "DEFAULT"  # name of the source of a parameter that was not given


def _parse_bpw(text: str) -> float:
    try:
        bits = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of bits.") from None
    if not 0 < bits < math.inf:
        raise typer.BadParameter(f"bits per weight must be above zero, not {text}.")
    return bits


def _parse_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _parse_factor(text: str) -> tuple[str, float]:
    """'*.lm_head.*=4' -> ('*.lm_head.*', 4.0)."""
    pattern, _, number = text.rpartition("=")
    try:
        factor = float(number)
    except ValueError:
        factor = -1.0
    if not pattern or not 0 <= factor < math.inf:
        raise typer.BadParameter(f"{text!r} is not understood; write it as PATTERN=2.5.")
    return pattern, factor


Bpw = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        parser=_parse_bpw,
        rich_help_panel=_BUDGET,
        show_default=False,
        help="Choose K by tensor: at most X bits per quantized weight, codebooks not counted.",
    ),
]
Size = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=_parse_bytes,
        rich_help_panel=_BUDGET,
        show_default=False,
        help="Choose K by tensor: all weight files together, kept tensors too, take at most SIZE (20GiB, 500MB).",
    ),
]
Error = Annotated[
    Literal["relative", "none", "importance"],
    typer.Option(
        rich_help_panel=_BUDGET,
        help="Made small: each tensor's error relative to its weights, the plain sum, or weighted by importance.",
    ),
]
Weight = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P=F",
        rich_help_panel=_BUDGET,
        show_default=False,
        help="The error of tensors that P matches counts F times. Repeatable.",
    ),
]
Tie = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P",
        rich_help_panel=_BUDGET,
        show_default=False,
        help="One K for all that P matches (for each value of the groups of a re:REGEX). Repeatable.",
    ),
]
Sample = Annotated[
    bool,
    typer.Option("--sample", rich_help_panel=_BUDGET, help="Measure a sample of each big tensor: quick, approximate."),
]
Importance = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Mean squared activations by column: .safetensors, or llama.cpp's imatrix (.gguf, .dat).",
    ),
]
Rule = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P=DO",
        rich_help_panel=_RULES,
        show_default=False,
        help="DO: k4, keep, scale=absmax, codebook=fit, or some with commas. The first that matches wins. Repeatable.",
    ),
]
Recipe = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", rich_help_panel=_RULES, show_default=False, help="Rules and options from a TOML file."
    ),
]
WriteRecipe = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", rich_help_panel=_RULES, show_default=False, help="Write what was chosen, as a recipe."
    ),
]


def gathered(context: typer.Context, recipe: Path | None, **given: Any) -> QuantizeOptions:
    """The options of a run. What the command line does not give, the recipe may; its rules come after those given."""
    from kbitq.checkpoint import QuantizeOptions
    from kbitq.choose.knapsack import Budget
    from kbitq.choose.recipe import Recipe, load_recipe, parse_rule

    loaded = load_recipe(recipe) if recipe is not None else Recipe()
    for key, value in loaded.options.items():
        if key in given and context.get_parameter_source(key).name == _DEFAULTED:
            given[key] = value
    wishes = [f"--{key}" for key in ("k", "bpw", "size") if given[key] is not None]
    if len(wishes) > 1:
        raise typer.BadParameter(f"{' and '.join(wishes)} cannot go together.")
    rules = (*map(parse_rule, given.pop("rule") or ()), *loaded.rules)
    if not wishes and not rules:
        raise typer.BadParameter("Missing option '--k' (or --bpw, --size, --rule or --recipe).")
    spent = {key: given.pop(key) for key in ("bpw", "size", "error", "weight", "tie", "sample")}
    budget = None
    if spent["bpw"] is not None or spent["size"] is not None:
        factors, ties = tuple(map(_parse_factor, spent["weight"] or ())), tuple(spent["tie"] or ())
        budget = Budget(spent["bpw"], spent["size"], spent["error"], factors, ties, spent["sample"])
    lists = {key: tuple(given.pop(key) or ()) for key in ("include", "exclude", "only")}
    _check_importance(loaded.importance, given["importance"])
    return QuantizeOptions(**given, **lists, rules=rules, budget=budget)


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


def finished(plan: Plan, write_recipe: Path | None) -> Plan:
    """The plan with its budget spent, and its recipe written where that is asked for."""
    from kbitq import checkpoint
    from kbitq.cli.console import console

    if plan.options.budget is not None:
        with console.progress("measuring") as progress:
            plan = checkpoint.choose(plan, progress)
    if write_recipe is not None:
        checkpoint.write_recipe(plan, write_recipe)
        console.note(f"the recipe is in {write_recipe}")
    return plan
