"""``kbitq verify``: whether a quantized checkpoint is whole and says the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kbitq.cli.console import console
from kbitq.cli.options import arguments, checking, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

if TYPE_CHECKING:
    from pathlib import Path

EPILOG = parsing.examples(
    "kbitq verify ./llama-k4",
    "kbitq verify ./llama-k4 --source ./Llama-3.2-1B --full",
    "kbitq verify ./llama-k4 --source ./Llama-3.2-1B --full --importance llama.imatrix.gguf",
    "kbitq verify ./llama-k4 --repair-index",
)


@spread
def command(
    path: arguments.Quantized,
    source: checking.MadeFrom = None,
    full: checking.Full = False,
    sample: checking.SampleCount = None,
    importance: checking.UsedImportance = None,
    repair_index: checking.RepairIndex = False,
    *,
    talk: Printing,
) -> None:
    """Check a quantized checkpoint: structure, values, checksums; with --source, quantize again and compare bytes.

    Exit code 1 and a line for each problem if there is one.
    """
    console.begin(**vars(talk))
    _check(source, importance, full=full, sample=sample)
    from kbitq import checkpoint
    from kbitq.cli import sources
    from kbitq.cli.views import verification

    if repair_index:
        index = checkpoint.repair_index(path)
        console.note(f"wrote {index}" if index else f"{path} is one file and needs no index")
    target, original = sources.find(path).place, source and sources.find(source).place
    how = {"full": full} if sample is None else {"sample": sample}
    with console.progress("verifying") as progress:
        report = checkpoint.verify(target, original, importance=importance, progress=progress, **how)
    verification.show(path, report)


def _check(source: Path | None, importance: Path | None, *, full: bool, sample: int | None) -> None:
    """A usage error for options that say how to compare with a source, where there is none."""
    if source is None and importance is not None:
        raise typer.BadParameter("--importance is for making tensors again with --source, which is missing.")
    if source is None and (full or sample is not None):
        raise typer.BadParameter("--full and --sample say how much to compare with --source, which is missing.")
    if full and sample is not None:
        raise typer.BadParameter("--full and --sample exclude each other.")
