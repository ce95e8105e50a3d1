"""``kbitq calibrate``: what the weights of a model are given to work on, as sums over a text."""

from __future__ import annotations

import typer

from kbitq.cli.console import console
from kbitq.cli.options import calibrating, output, parsing, running
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

EPILOG = parsing.examples(
    "kbitq calibrate ./llama --text wiki.txt -o stats",
    "kbitq calibrate ./llama --text code.txt --text chat.jsonl --field content -o stats",
    "kbitq inspect stats",
    "kbitq quantize ./llama --k 2 --calibration stats",
)

_UNFINISHED = (
    "nothing is under the final name yet; run again, and a model that is run layer by layer goes on where it was"
)


@spread
def command(
    model: calibrating.Model,
    text: calibrating.Texts,
    out: calibrating.Output,
    field: calibrating.Field = "text",
    samples: calibrating.Samples = 128,
    length: calibrating.Length = 2048,
    seed: calibrating.Seed = 0,
    hessian_block: calibrating.HessianBlock = 8192,
    max_memory: calibrating.MaxMemory = None,
    device: calibrating.Device = "auto",
    dtype: running.ComputeDtype = "auto",
    trust_remote_code: running.TrustRemoteCode = False,
    force: output.Force = False,
    *,
    talk: Printing,
) -> None:
    """Run a model over a text, and write how the inputs of its weights vary together: once, for every K and codec.

    For each input of weights to be quantized OUT gets the sum over tokens of x xᵀ.
    """
    console.begin(**vars(talk), unfinished=_UNFINISHED)
    if not text:
        raise typer.BadParameter("Give a text to calibrate on: --text FILE.")
    from kbitq.calibration.calibrate import Options, calibrate
    from kbitq.cli import sources
    from kbitq.cli.views import calibration
    from kbitq.cli.views.text import count_text

    options = Options(samples, length, seed, field, hessian_block, device, dtype, trust_remote_code, force, max_memory)
    folder = sources.local(model)
    with console.progress("running", lambda rate: f"{count_text(rate)} tokens") as progress:
        made = calibrate(folder, text, out, options, progress)
    for note in made.notes:
        console.note(note)
    calibration.show_made(made)
