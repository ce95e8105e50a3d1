"""``kbitq inspect``: what a quantized checkpoint holds and what it cost; what each K would cost before quantizing."""

from __future__ import annotations

import typer

from kbitq.cli.console import console
from kbitq.cli.options import arguments as options
from kbitq.cli.views import looks

EPILOG = options.examples(
    "kbitq inspect model-kbitq-k3.safetensors --sort sqnr",
    "kbitq inspect model-kbitq-k3.safetensors --against model.safetensors",
    "kbitq inspect model.safetensors --k 2,3,4 --sample",
    "kbitq inspect ./llama-k3 --by role --worst 10 --against ./llama --html report.html",
    "kbitq inspect ./llama-k3 --diff ./llama-3.25bpw",
)


def command(
    path: options.Checkpoint,
    against: options.Against = None,
    k: options.Ks = "2,3,4,5",  # type: ignore[assignment]  # parsed by the option
    sample: options.Sample = False,
    sort: options.Sort = "name",
    by: looks.By = "tensor",
    worst: looks.Worst = None,
    histograms: looks.Histograms = False,
    diff: looks.Diff = None,
    html: looks.Html = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Show every quantized tensor's size and error; of an ordinary checkpoint, what each K would give."""
    console.begin(wants_json=json, quiet=quiet, debug=debug)
    from kbitq import checkpoint
    from kbitq.cli import sources
    from kbitq.cli.views import inspection

    target, source = sources.find(path).place, against and sources.find(against).place

    with console.progress("measuring") as progress:
        if html is None:
            report = checkpoint.inspect(target, against=source, ks=k, sample=sample, progress=progress)
        else:
            from kbitq.report.html import write_page

            report = write_page(target, html, source, progress)
    if not report.quantized and (by != "tensor" or worst or histograms or diff):
        raise typer.BadParameter("--by, --worst, --histograms and --diff are for quantized checkpoints.")
    other = None
    if diff is not None:
        with console.progress("measuring") as progress:
            other = checkpoint.inspect(sources.find(diff).place, against=source, progress=progress)
    counted = looks.counted(target) if histograms else None
    inspection.show(report, sort, k, inspection.Look(by, worst, counted, other))
    if html is not None:
        console.note(f"the page is in {html}")
