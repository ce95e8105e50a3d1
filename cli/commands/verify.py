"""``kbitq verify``: whether a quantized checkpoint is whole and says the truth."""

from __future__ import annotations

import typer

from kbitq.cli.console import console
from kbitq.cli.errors import FAILED
from kbitq.cli.options import arguments as options

EPILOG = options.examples(
    "kbitq verify ./llama-k4",
    "kbitq verify ./llama-k4 --source ./Llama-3.2-1B --full",
    "kbitq verify ./llama-k4 --repair-index",
)


def command(
    path: options.Quantized,
    source: options.MadeFrom = None,
    full: options.Full = False,
    sample: options.SampleCount = None,
    repair_index: options.RepairIndex = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Check a quantized checkpoint: structure, values, checksums; with --source, quantize again and compare bytes.

    Exit code 1 and a line for each problem if there is one.
    """
    console.begin(wants_json=json, quiet=quiet, debug=debug)
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
    if json:
        console.object(report.to_json())
    else:
        for line in () if quiet else report.checks:
            console.data(line)
        for problem in report.problems:
            console.data(f"problem: {problem}")
    if not report.ok:
        count = len(report.problems)
        console.error(
            f"{path} has {count} problem{'s' if count > 1 else ''}", "do not use it; make or download it again"
        )
        raise typer.Exit(FAILED)
    if not json and not quiet:
        console.data(f"{path} is as it should be")
