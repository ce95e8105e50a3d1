"""``kbitq verify``: whether a quantized checkpoint is whole and says the truth."""

from __future__ import annotations

import typer

from kbitq.cli.console import console
from kbitq.cli.errors import FAILED
from kbitq.cli.options import arguments, checking, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

EPILOG = parsing.examples(
    "kbitq verify ./llama-k4",
    "kbitq verify ./llama-k4 --source ./Llama-3.2-1B --full",
    "kbitq verify ./llama-k4 --repair-index",
)


@spread
def command(
    path: arguments.Quantized,
    source: checking.MadeFrom = None,
    full: checking.Full = False,
    sample: checking.SampleCount = None,
    repair_index: checking.RepairIndex = False,
    *,
    talk: Printing,
) -> None:
    """Check a quantized checkpoint: structure, values, checksums; with --source, quantize again and compare bytes.

    Exit code 1 and a line for each problem if there is one.
    """
    console.begin(**vars(talk))
    if source is None and (full or sample is not None):
        raise typer.BadParameter("--full and --sample say how much to compare with --source, which is missing.")
    if full and sample is not None:
        raise typer.BadParameter("--full and --sample exclude each other.")
    from kbitq import checkpoint
    from kbitq.cli import sources

    if repair_index:
        index = checkpoint.repair_index(path)
        console.note(f"wrote {index}" if index else f"{path} is one file and needs no index")
    target, original = sources.find(path).place, source and sources.find(source).place
    how = {"full": full} if sample is None else {"sample": sample}
    with console.progress("verifying") as progress:
        report = checkpoint.verify(target, original, progress=progress, **how)
    if talk.json:
        console.object(report.to_json())
    else:
        for line in () if talk.quiet else report.checks:
            console.data(line)
        for problem in report.problems:
            console.data(f"problem: {problem}")
    if not report.ok:
        count = len(report.problems)
        console.error(
            f"{path} has {count} problem{'s' if count > 1 else ''}", "do not use it; make or download it again"
        )
        raise typer.Exit(FAILED)
    if not talk.json and not talk.quiet:
        console.data(f"{path} is as it should be")
