"""What ``kbitq plan`` and ``quantize --dry-run`` show: verdicts, sizes, whether it fits, how long it will take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from kbitq import checkpoint
from kbitq.cli.console import console
from kbitq.cli.errors import FAILED, explain
from kbitq.cli.views import budget, summary
from kbitq.cli.views.tables import Table, facts
from kbitq.cli.views.text import seconds_text, size_text
from kbitq.errors import OutputExistsError

if TYPE_CHECKING:
    from kbitq.checkpoint import Estimate, Plan


def show(plan: Plan) -> None:
    """Print a plan. The exit code is 1 if it does not fit on the disk."""
    estimate = checkpoint.estimate(plan)
    obstacle = _obstacle(plan)
    ledger = {**plan.to_json(), "estimate": estimate.to_json(), "obstacle": obstacle}
    summary.notes([*ledger["notes"], *([obstacle] if obstacle else [])])
    if console.wants_json:
        console.object(ledger)
    else:
        if not console.quiet:
            _tables(plan, ledger, estimate)
            console.note("this is a plan; nothing was written")
        console.data(str(plan.out))
    if not estimate.fits:
        need, free = size_text(estimate.disk_needed), size_text(estimate.disk_free)
        console.error(
            f"{plan.out} needs {need}, but its disk has {free} free", "free some space, or choose another place with -o"
        )
        raise typer.Exit(FAILED)


def _obstacle(plan: Plan) -> str | None:
    """Why ``quantize`` would refuse to write the output that is planned, and what helps."""
    try:
        checkpoint.check_output(plan)
    except OutputExistsError as error:
        sentence, hint, _ = explain(error)
        return f"{sentence}, so quantize would stop here; {hint}"
    return None


def _tables(plan: Plan, ledger: Mapping[str, Any], estimate: Estimate) -> None:
    lines = [
        *summary.sizes(ledger["totals"]),
        ("files", f"{len(ledger['files'])} with weights, {len(ledger['carried'])} carried over"),
        ("disk", f"{size_text(estimate.disk_needed)} needed, {size_text(estimate.disk_free)} free"),
        ("memory", f"about {size_text(estimate.peak_memory)} beyond the interpreter with torch"),
        ("time", f"about {seconds_text(estimate.seconds)} on this machine"),
    ]
    if calibrated := sum(plan.hessian(tensor) is not None for tensor in plan.tensors):
        quantized = ledger["totals"]["quantized"]
        count = "all tensors" if calibrated == quantized else f"{calibrated} of {quantized} tensors"
        lines.insert(2, ("calibrated", f"{count}, by error feedback"))
    if plan.choice is not None:
        console.show(budget.curve(plan.choice), "")
        lines += budget.facts_of(plan.choice)
    splits = ledger["tensor_parallel"]
    console.show(summary.verdicts(ledger["tensors"]), "", facts(lines), "", parallel(splits), *not_split(splits), "")


def not_split(splits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """For the fewest devices over which a tensor cannot be split along inputs: why, and how many there are."""
    for row in splits.values():
        if why := row.get("why"):
            return [why[0] + (f" (so for {len(why)} tensors)" if len(why) > 1 else "")]
    return []


def parallel(splits: Mapping[str, Mapping[str, Any]]) -> Table:
    """How many quantized tensors can be split over 2, 4, 8 devices at block borders."""
    made = Table("tensor parallel over", *splits)
    made.add_row("split along outputs", *(str(row["outputs"]) for row in splits.values()))
    made.add_row("split along inputs", *(str(row["inputs"]) for row in splits.values()))
    made.add_row("cannot be split", *(str(len(row["neither"])) for row in splits.values()))
    return made
