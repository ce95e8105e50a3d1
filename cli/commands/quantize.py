"""``kbitq quantize``: a checkpoint in, a quantized checkpoint out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from kbitq.cli.console import console
from kbitq.cli.options import hub, output, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.request import Request, finished, options_of, write_recipe
from kbitq.cli.options.signature import spread

if TYPE_CHECKING:
    from pathlib import Path

    from kbitq.checkpoint import Plan
    from kbitq.hub import Repo

EPILOG = parsing.examples(
    "kbitq quantize model.safetensors --k 3",
    "kbitq quantize ./Llama-3.2-1B --k 4 -o ./llama-k4 --exclude '*down_proj*'",
    "kbitq quantize ./Llama-3.2-1B --bpw 3.5 --codebook fit --write-recipe llama.toml",
    "kbitq quantize model.safetensors --k 2 --only 're:.*\\.mlp\\..*' --dry-run",
)

_UNFINISHED = "nothing is under the final name yet; run again, the same quantize goes on from where it was"


@dataclass(frozen=True)
class Publishing:
    """What follows a run, or stands in its place."""

    push: hub.Push = None
    private: hub.Private = False
    dry_run: output.DryRun = False


@spread
def command(context: typer.Context, request: Request, publishing: Publishing, talk: Printing) -> None:
    """Quantize the weights of a checkpoint to N bits each, or to as many as each can use within a budget.

    Norms, biases, embeddings, output heads and routers are kept as they are; every tensor gets a verdict and a reason.
    """
    console.begin(**vars(talk), unfinished=_UNFINISHED)
    from kbitq import checkpoint
    from kbitq.cli import sources

    options, target = options_of(request, context), _repository(publishing)
    found = sources.find(request.source, stream=request.stream)
    plan = finished(
        checkpoint.plan_quantize(found.place, request.output, options, dry=publishing.dry_run), request.write_recipe
    )
    if publishing.dry_run:
        from kbitq.cli.views import planning

        write_recipe(plan, request.write_recipe)
        planning.show(plan)
        return
    out = _carry_out(plan)
    write_recipe(plan, request.write_recipe)
    if target is not None:
        from kbitq.cli import publish

        pushed = publish.publish(out, target, base=found.base, private=publishing.private, pull_request=False)
        console.note(f"published at {pushed.url}")


def _carry_out(plan: Plan) -> Path:
    """Run the plan, show what it came to, and return where the output is."""
    from kbitq import checkpoint
    from kbitq.checkpoint.source.read_ahead import ReadAhead
    from kbitq.cli.views import summary

    summary.notes(plan.checkpoint.notes)
    with ReadAhead(plan.checkpoint):
        run = checkpoint.run  # imports torch
    with console.progress("quantizing") as progress:
        report = run(plan, progress)
    summary.quantized(report)
    return report.out


def _repository(publishing: Publishing) -> Repo | None:
    """Where to publish. A misspelt name or a token that is missing should come to light before the work."""
    if publishing.push is None:
        return None
    from kbitq.cli import publish
    from kbitq.hub import check_token

    target = publish.target(publishing.push)
    if not publishing.dry_run:
        check_token(needed=True)
    return target
