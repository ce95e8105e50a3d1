"""``kbitq plan``: what ``kbitq quantize`` with the same options would do. The same thing as its ``--dry-run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kbitq.cli.console import console
from kbitq.cli.options import machines, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.request import Request, finished, options_of, write_recipe
from kbitq.cli.options.signature import spread

if TYPE_CHECKING:
    from pathlib import Path

    from kbitq.checkpoint import Plan

EPILOG = parsing.examples(
    "kbitq plan model.safetensors --k 3",
    "kbitq plan ./Llama-3.2-1B --k 4 --exclude '*down_proj*' --json",
    "kbitq plan ./Llama-3.2-1B --k 4 -o ./llama-k4 --save plan.json",
)


@spread
def command(context: typer.Context, request: Request, save: machines.SavePlan = None, *, talk: Printing) -> None:
    """Show what quantize would do: verdicts, sizes, files. From headers alone, except that a budget has to measure.

    With --save, write it down for kbitq work to carry out, part by part; then a budget is measured by those parts.
    """
    console.begin(**vars(talk))
    from kbitq import checkpoint
    from kbitq.cli import sources
    from kbitq.cli.views import planning

    options = options_of(request, context)
    found = sources.find(request.source, stream=request.stream)
    plan = checkpoint.plan_quantize(found.place, request.output, options, dry=save is None)
    if save is not None:
        _save(plan, request, save)
        return
    plan = finished(plan, request.write_recipe)
    write_recipe(plan, request.write_recipe)
    planning.show(plan)


def _save(plan: Plan, request: Request, path: Path) -> None:
    """Write the file of the plan, and say what to do with it."""
    from kbitq.cli.views import summary
    from kbitq.cluster import save_plan

    if request.write_recipe is not None and plan.options.budget is not None:
        raise typer.BadParameter("--write-recipe needs the K that a budget chooses, which --save leaves to the parts.")
    write_recipe(plan, request.write_recipe)
    saved = save_plan(plan, path)
    summary.notes(plan.notes)
    if console.wants_json:
        console.object({**plan.to_json(), "plan": str(saved.path), "hash": saved.hash})
        return
    console.note(
        f"kbitq work {path} --part I/N does part I (from 0) of N; kbitq finish {path} then publishes {plan.out}"
    )
    console.data(str(path))
