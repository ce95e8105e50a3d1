"""``kbitq inspect``: what a quantized checkpoint holds and what it cost; what each K would cost before quantizing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kbitq.cli.console import console
from kbitq.cli.options import arguments, coding, looking, output, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.request import codec_of
from kbitq.cli.options.signature import spread
from kbitq.format import DEFAULT_CODEC

if TYPE_CHECKING:
    from pathlib import Path

    from kbitq.checkpoint.source.storage import Storage
    from kbitq.report.usage import Usage

EPILOG = parsing.examples(
    "kbitq inspect model-kbitq-k3.safetensors --sort sqnr",
    "kbitq inspect model-kbitq-k3.safetensors --against model.safetensors",
    "kbitq inspect model.safetensors --k 2,3,4 --sample",
    "kbitq inspect model.safetensors --k 2,3,4 --codec trellis",
    "kbitq inspect ./llama-k3 --by role --worst 10 --against ./llama --html report.html",
    "kbitq inspect ./llama-k3 --diff ./llama-3.25bpw",
    "kbitq inspect ./llama-k3 --diff ./llama-3.25bpw --html compared.html",
)


@spread
def command(
    path: arguments.Checkpoint,
    against: looking.Against = None,
    k: looking.Ks = "2,3,4,5",  # type: ignore[assignment, type-arg]  # parsed by the option
    codec: coding.TriedCodec = DEFAULT_CODEC,
    scale_block: coding.ScaleBlock = "32",  # type: ignore[assignment]  # parsed by the option
    sample: looking.Sample = False,
    sort: looking.Sort = "name",
    by: looking.By = "tensor",
    worst: looking.Worst = None,
    histograms: looking.Histograms = False,
    diff: looking.Diff = None,
    html: looking.Html = None,
    force: output.Force = False,
    *,
    talk: Printing,
) -> None:
    """Show every quantized tensor's size and error; of an ordinary checkpoint, what each K would give.

    Of a folder that kbitq calibrate wrote it shows the inputs, their columns and tokens.
    """
    console.begin(**vars(talk))
    if (path / "calibration.json").is_file():
        from kbitq.cli.views import calibration

        calibration.show(path)
        return
    from kbitq import checkpoint
    from kbitq.cli import sources
    from kbitq.cli.views import inspection

    target, source = sources.find(path).place, against and sources.find(against).place
    beside = diff and sources.find(diff).place
    with console.progress("measuring") as progress:
        if html is None:
            tried = codec_of(codec, scale_block)
            reports = [checkpoint.inspect(target, source, k, sample, progress, tried)]
            if beside and reports[0].quantized:
                reports.append(checkpoint.inspect(beside, against=source, progress=progress))
        else:
            from kbitq.report.html import write_page

            reports = write_page(target, html, source, progress, diff=beside or None, force=force)
    report, other = reports[0], reports[1] if len(reports) > 1 else None
    if not report.quantized and (by != "tensor" or worst or histograms or diff):
        raise typer.BadParameter("--by, --worst, --histograms and --diff are for quantized checkpoints.")
    if html is not None and talk.quiet and not talk.json:
        console.data(str(html))
        return
    counted = _counted(target) if histograms else None
    inspection.show(report, sort, k, inspection.Look(by, worst, counted, other))
    if html is not None:
        console.note(f"the page is in {html}")


def _counted(place: Path | Storage) -> dict[str, Usage]:
    """The use of scale bytes and levels in every tensor."""
    from kbitq.checkpoint.written.stored import open_quantized
    from kbitq.report.usage import usage

    opened = open_quantized(place)
    with console.progress("counting") as progress:
        return usage(opened, list(opened.tensors), None, progress)
