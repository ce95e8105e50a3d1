"""``kbitq quantize``: a checkpoint in, a quantized checkpoint out."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kbitq.cli.console import console
from kbitq.cli.options import hub, machines, output, parsing
from kbitq.cli.options.divergence import Divergence
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.request import Request, finished, options_of, write_recipe
from kbitq.cli.options.signature import spread

if TYPE_CHECKING:
    from kbitq.checkpoint import Plan, QuantizeOptions
    from kbitq.checkpoint.source.storage import Storage
    from kbitq.hub import Repo

EPILOG = parsing.examples(
    "kbitq quantize model.safetensors --k 3",
    "kbitq quantize ./Llama-3.2-1B --k 4 -o ./llama-k4 --exclude '*down_proj*'",
    "kbitq quantize ./Llama-3.2-1B --bpw 3.5 --codebook fit --write-recipe llama.toml",
    "kbitq quantize ./Llama-3.2-1B --kl 0.05 --text wiki.txt",
    "kbitq quantize model.safetensors --k 2 --only 're:.*\\.mlp\\..*' --dry-run",
    "kbitq quantize /nfs/llama --k 3 -o /nfs/llama-k3 --cluster auto",
)

_UNFINISHED = "nothing is under the final name yet; run again, the same quantize goes on from where it was"


@dataclass(frozen=True)
class Publishing:
    """What follows a run, or stands in its place."""

    push: hub.Push = None
    private: hub.Private = False
    dry_run: output.DryRun = False


@dataclass(frozen=True)
class Machines:
    """Which machines do it, where that is not this one."""

    cluster: machines.Cluster = None
    gpus_per_worker: machines.GpusPerWorker = 0
    cpus_per_worker: machines.CpusPerWorker = None
    workers: machines.Workers = None
    stall: machines.Stall = 600.0

    def check(self, device: str) -> None:
        """Raise BadParameter for options that say where, but not on which machines, or the other way round."""
        if self.cluster is None:
            usual = {field.name: field.default for field in fields(self)}
            if given := [name for name, value in vars(self).items() if value != usual[name]]:
                raise typer.BadParameter(f"--{given[0].replace('_', '-')} needs --cluster.")
        elif device not in ("auto", "cpu") and not self.gpus_per_worker and self.cluster != "slurm":
            raise typer.BadParameter("with --cluster, --gpus-per-worker says how many GPUs a worker has, not --device.")


@spread
def command(
    context: typer.Context,
    request: Request,
    wanted: Divergence,
    publishing: Publishing,
    machines: Machines,
    talk: Printing,
) -> None:
    """Quantize the weights of a checkpoint to N bits each, or to as many as each can use within a budget.

    Norms, biases, embeddings, output heads and routers are kept as they are; every tensor gets a verdict and a reason.
    """
    console.begin(**vars(talk), unfinished=_UNFINISHED)
    from kbitq import checkpoint
    from kbitq.cli import sources

    wanted.check(dry_run=publishing.dry_run, stream=request.stream, cluster=machines.cluster is not None)
    machines.check(request.device)
    options, target = options_of(request, context, wanted.kl), _repository(publishing)
    found = sources.find(request.source, stream=request.stream)
    if wanted.kl is not None:
        _publish(_searched(found.place, request, options, wanted), target, found.base, publishing)
        return
    plan = checkpoint.plan_quantize(found.place, request.output, options, dry=publishing.dry_run)
    if machines.cluster is not None and not publishing.dry_run:
        out = _on_cluster(plan, request, publishing, machines)
        if out is not None:
            _publish(out, target, found.base, publishing)
        return
    plan = finished(plan, request.write_recipe)
    if publishing.dry_run:
        from kbitq.cli.views import planning

        write_recipe(plan, request.write_recipe)
        planning.show(plan)
        return
    out = _carry_out(plan)
    write_recipe(plan, request.write_recipe)
    _publish(out, target, found.base, publishing)


def _searched(source: Path | Storage, request: Request, options: QuantizeOptions, wanted: Divergence) -> Path:
    """Find the smallest budget for a divergence, quantize with it, and save what was measured beside the output."""
    from kbitq.checkpoint.plan.recipe import check_recipe_file
    from kbitq.cli import cards, divergence

    assert isinstance(source, Path) and wanted.kl is not None  # with --kl nothing is streamed
    made = divergence.plan(source, request.output, options, wanted.kl)
    if request.write_recipe is not None:
        check_recipe_file(made, request.write_recipe)
    plan, measured = divergence.search(made, source, wanted)
    out = _carry_out(plan)
    write_recipe(plan, request.write_recipe)
    if plan.to_folder:
        text = wanted.text or wanted.tokens
        cards.save(out, measured, text, cards.before_saving(out, text))
    return out


def _publish(out: Path, target: Repo | None, base: str | None, publishing: Publishing) -> None:
    if target is not None:
        from kbitq.cli import publish

        pushed = publish.publish(out, target, base=base, private=publishing.private, pull_request=False)
        console.note(f"published at {pushed.url}")


def _on_cluster(plan: Plan, request: Request, publishing: Publishing, machines: Machines) -> Path | None:
    """Let a Ray cluster carry the plan out, or print the script for Slurm, which has no output yet."""
    from kbitq.checkpoint.plan.recipe import check_recipe_file
    from kbitq.cli.views import summary

    if machines.cluster == "slurm":
        if publishing.push is not None or request.write_recipe is not None:
            raise typer.BadParameter("--push and --write-recipe need the output, which Slurm makes later.")
        _print_script(plan, machines)
        return None
    from kbitq.cluster.ray_launcher import quantize_on_ray
    from kbitq.cluster.ray_nodes import RayOptions

    if request.write_recipe is not None:
        check_recipe_file(plan, request.write_recipe)
    summary.notes(plan.notes)
    assert machines.cluster is not None
    how = RayOptions(
        machines.cluster, machines.gpus_per_worker, machines.cpus_per_worker, machines.workers, machines.stall
    )
    with console.progress("quantizing") as progress:
        plan, report = quantize_on_ray(plan, how, progress, console.note)
    summary.quantized(report)
    write_recipe(plan, request.write_recipe)
    return report.out


def _print_script(plan: Plan, machines: Machines) -> None:
    from kbitq.cluster import save_plan
    from kbitq.cluster.slurm import DEFAULT_TASKS, slurm_script

    saved = save_plan(plan)
    tasks = machines.workers or DEFAULT_TASKS
    console.write(slurm_script(saved, tasks, machines.gpus_per_worker, machines.cpus_per_worker))


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
