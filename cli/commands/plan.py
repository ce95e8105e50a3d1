"""``kbitq plan``: what ``kbitq quantize`` with the same options would do. The same thing as its ``--dry-run``."""

from __future__ import annotations

import typer

from kbitq.cli.console import console
from kbitq.cli.options import arguments as options
from kbitq.cli.options import choices

EPILOG = options.examples(
    "kbitq plan model.safetensors --k 3",
    "kbitq plan ./Llama-3.2-1B --k 4 --exclude '*down_proj*' --json",
)


def command(
    context: typer.Context,
    source: options.Source,
    k: options.K = None,
    output: options.Output = None,
    scale: options.Scale = "mse",
    codebook: options.Codebook = "optimal",
    importance: choices.Importance = None,
    max_memory: options.MaxMemory = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    only: options.Only = None,
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
    max_shard_size: options.MaxShardSize = "5GB",  # type: ignore[assignment]  # parsed by the option
    stream: options.Stream = False,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Show what quantize would do: verdicts, sizes, files. From headers alone, except that a budget has to measure."""
    console.begin(wants_json=json, quiet=quiet, debug=debug)
    from kbitq import checkpoint
    from kbitq.cli import sources
    from kbitq.cli.views import planning

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
    plan = checkpoint.plan_quantize(sources.find(source, stream=stream).place, output, wanted)
    plan = choices.finished(plan, write_recipe)
    planning.show(plan)
