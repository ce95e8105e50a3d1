"""``kbitq finish``: completes and publishes the output of a plan whose parts are done."""

from __future__ import annotations

from kbitq.cli.console import console
from kbitq.cli.options import machines, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

EPILOG = parsing.examples("kbitq finish plan.json")


@spread
def command(plan: machines.PlanFile, *, talk: Printing) -> None:
    """Check that all parts of a plan are done, write headers, index, config, checksums and report, and publish it."""
    console.begin(**vars(talk), unfinished="nothing is under the final name yet; run kbitq finish again")
    from kbitq.cli.views import summary
    from kbitq.cluster import finish

    with console.progress("finishing") as progress:
        report = finish(plan, progress=progress)
    summary.notes(report.notes)
    summary.quantized(report)
