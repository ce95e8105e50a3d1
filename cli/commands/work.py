"""``kbitq work``: one part of a plan that several machines carry out."""

from __future__ import annotations

import typer

from kbitq.cli.console import console
from kbitq.cli.options import machines, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

EPILOG = parsing.examples(
    "kbitq plan ./Llama-3.2-1B --k 4 -o ./llama-k4 --save plan.json",
    "kbitq work plan.json --part 0/2",
    "kbitq work plan.json --part 1/2",
    "kbitq finish plan.json",
)
_UNFINISHED = "the same kbitq work, on any machine, goes on from where it was"


@spread
def command(
    plan: machines.PlanFile,
    part: machines.PartOf = None,
    device: machines.Device = None,
    patience: machines.Patience = 120.0,
    *,
    talk: Printing,
) -> None:
    """Do one part of a plan. It can be repeated, and goes on from what any attempt at it did; 0 means it is complete.

    Codebooks, budgets and scales need all parts of an earlier phase: there it waits for the others and says so.
    """
    console.begin(**vars(talk), unfinished=_UNFINISHED)
    from kbitq.cluster import parse_part, part_of_environment

    mine = parse_part(part) if part is not None else part_of_environment()
    if mine is None:
        raise typer.BadParameter("Missing option '--part' (RANK and WORLD_SIZE, or a Slurm array, give it too).")
    from kbitq.cluster import work

    with console.progress("working") as progress:
        report = work(plan, mine, device=device, patience=patience, progress=progress, say=console.note)
    if console.wants_json:
        counts = {"done": report.done, "reused": report.reused, "taken_over": report.taken_over}
        console.object({"part": str(report.part), **counts})
    elif not console.quiet:
        console.note(
            f"part {report.part} is complete: {report.done} pieces done, {report.reused} were there already, "
            f"{report.taken_over} done for others"
        )
