"""``kbitq plan``: what ``kbitq quantize`` with the same options would do. The same thing as its ``--dry-run``."""

from __future__ import annotations

import typer

from kbitq.cli.console import console
from kbitq.cli.options import parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.request import Request, finished, options_of, write_recipe
from kbitq.cli.options.signature import spread

EPILOG = parsing.examples(
    "kbitq plan model.safetensors --k 3",
    "kbitq plan ./Llama-3.2-1B --k 4 --exclude '*down_proj*' --json",
)


@spread
def command(context: typer.Context, request: Request, talk: Printing) -> None:
    """Show what quantize would do: verdicts, sizes, files. From headers alone, except that a budget has to measure."""
    console.begin(**vars(talk))
    from kbitq import checkpoint
    from kbitq.cli import sources
    from kbitq.cli.views import planning

    options = options_of(request, context)
    found = sources.find(request.source, stream=request.stream)
    plan = finished(checkpoint.plan_quantize(found.place, request.output, options, dry=True), request.write_recipe)
    write_recipe(plan, request.write_recipe)
    planning.show(plan)
