"""``kbitq quantize``: a checkpoint in, a quantized checkpoint out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kbitq.cli.console import console
from kbitq.cli.options import arguments as options
from kbitq.cli.options import choices

if TYPE_CHECKING:
    from kbitq.hub import Repo

EPILOG = options.examples(
    "kbitq quantize model.safetensors --k 3",
    "kbitq quantize ./Llama-3.2-1B --k 4 -o ./llama-k4 --exclude '*down_proj*'",
    "kbitq quantize ./Llama-3.2-1B --bpw 3.5 --codebook fit --write-recipe llama.toml",
    "kbitq quantize model.safetensors --k 2 --only 're:.*\\.mlp\\..*' --dry-run",
)


def command(
    context: typer.Context,
    source: options.Source,
    k: options.K = None,
    output: options.Output = None,
    scale: options.Scale = "mse",
    codebook: options.Codebook = "optimal",
    importance: choices.Importance = None,
    device: options.Devices = "auto",
    max_memory: options.MaxMemory = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    only: options.Only = None,
    on_nonfinite: options.OnNonfinite = "error",
    min_coverage: options.MinCoverage = "0%",  # type: ignore[assignment]  # parsed by the option
    keep_embeddings: options.KeepEmbeddings = True,
    bpw: choices.Bpw = None,
    size: choices.Size = None,
    error: choices.Error = "relative",
    weight: choices.Weight = None,
    tie: choices.Tie = None,
    sample: choices.Sample = False,
    rule: choices.Rule = None,
    recipe: choices.Recipe = None,
    write_recipe: choices.WriteRecipe = None,
    stream: options.Stream = False,
    max_shard_size: options.MaxShardSize = "5GB",  # type: ignore[assignment]  # parsed by the option
    force: options.Force = False,
    push: options.Push = None,
    private: options.Private = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Quantize the weights of a checkpoint to N bits each, or to as many as each can use within a budget.

    Norms, biases, embeddings, output heads and routers are kept as they are; every tensor gets a verdict and a reason.
    """
    console.begin(wants_json=json, quiet=quiet, debug=debug)
    from kbitq import checkpoint
    from kbitq.checkpoint.source.read_ahead import ReadAhead
    from kbitq.cli import sources
    from kbitq.cli.views import summary

    wanted = choices.gathered(
        context,
        recipe,
        k=k,
        scale=scale,
        codebook=codebook,
        importance=importance,
        include=include,
        exclude=exclude,
        only=only,
        keep_embeddings=keep_embeddings,
        device=device,
        on_nonfinite=on_nonfinite,
        max_shard_size=max_shard_size,
        force=force,
        max_memory=max_memory,
        min_coverage=min_coverage,
        bpw=bpw,
        size=size,
        error=error,
        weight=weight,
        tie=tie,
        sample=sample,
        rule=rule,
    )
    target = _repository(push)
    found = sources.find(source, stream=stream)
    plan = checkpoint.plan_quantize(found.place, output, wanted)
    plan = choices.finished(plan, write_recipe)
    if dry_run:
        from kbitq.cli.views import planning

        planning.show(plan)
        return
    summary.notes(plan.checkpoint.notes)
    with ReadAhead(plan.checkpoint):
        run = checkpoint.run  # imports torch
    with console.progress("quantizing") as progress:
        report = run(plan, progress)
    summary.quantized(report)
    if target is not None:
        from kbitq.cli import publish

        pushed = publish.publish(report.out, target, base=found.base, private=private, pull_request=False)
        console.note(f"published at {pushed.url}")


def _repository(push: str | None) -> Repo | None:
    """Where to publish: found out before the work, since a misspelt name should not come to light after it."""
    if push is None:
        return None
    from kbitq.cli import publish

    return publish.target(push)
