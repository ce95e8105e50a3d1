"""The recipe of a plan: with it the same source gives the same bytes, whatever chose the K."""

from __future__ import annotations

from pathlib import Path

from kbitq.checkpoint.plan.plan import Plan
from kbitq.choose.recipe import exactly, recipe_text
from kbitq.choose.selection import TensorRule
from kbitq.errors import CheckpointError


def plan_recipe(plan: Plan) -> str:
    """TOML: a rule for every tensor to be quantized, then the rules and options that decided what is kept, and why."""
    # All rules of the run stay: which one matches a kept tensor first is part of the reason written in the output.
    rules = [
        TensorRule(exactly(t.name), k=t.k, scale=t.scale, codebook=t.codebook) for t in plan.tensors if t.quantized
    ]
    rules += [rule for rule in plan.options.rules if rule not in rules]
    names = ("include", "exclude", "only", "keep_embeddings", "max_shard_size", "on_nonfinite")
    options = {name: getattr(plan.options, name) for name in names}
    if plan.importance is not None:
        options["importance"] = plan.importance.sha256
    return recipe_text(options, rules)


def write_recipe(plan: Plan, path: str | Path) -> None:
    """Write the recipe of a plan to a file. Raises CheckpointError where that cannot be done."""
    try:
        Path(path).write_text(plan_recipe(plan), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: the recipe cannot be written ({error.strerror})") from None
