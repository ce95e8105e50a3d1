"""The recipe of a plan: with it the same source gives the same bytes, whatever chose the K."""

from __future__ import annotations

from pathlib import Path

from kbitq.checkpoint.output.extra_output import check_extra_output, write_extra_output
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.choose.recipe import exactly, recipe_text
from kbitq.choose.selection import TensorRule
from kbitq.format import DEFAULT_CODEC


def plan_recipe(plan: Plan) -> str:
    """TOML: a rule for every tensor to be quantized, then the rules and options that decided what is kept, and why."""
    # All rules of the run stay: which one matches a kept tensor first is part of the reason written in the output.
    rules = [
        TensorRule(exactly(t.name), t.k is None, t.k, t.scale, t.codebook, _codec_of(t))
        for t in plan.tensors
        if t.quantized
    ]
    rules += [rule for rule in plan.options.rules if rule not in rules]
    names = ("include", "exclude", "only", "keep_embeddings", "max_shard_size", "on_nonfinite")
    options = {name: getattr(plan.options, name) for name in names}
    return recipe_text(options | plan.made_with, rules)


def _codec_of(tensor: TensorPlan) -> str | None:
    return None if tensor.codec == DEFAULT_CODEC else tensor.codec


def check_recipe_file(plan: Plan, path: str | Path) -> None:
    """Raise what ``write_recipe`` would raise, before the work that comes between."""
    check_extra_output(path, [plan.checkpoint.storage], plan.out, force=plan.options.force)


def write_recipe(plan: Plan, path: str | Path) -> None:
    """Write the recipe of a plan to a file, which never takes the place of the source or of the output.

    Raises:
        OutputExistsError: the file exists, and the plan's ``force`` is not set.
        CheckpointError: it is a part of the source or of the output, or cannot be written.
    """
    write_extra_output(path, plan_recipe(plan), [plan.checkpoint.storage], plan.out, force=plan.options.force)
