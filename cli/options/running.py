"""Running a model (``eval``, ``chat``, ``generate``) or a program (``run``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kbitq.cli.options import files, parsing

Reference = Annotated[
    Path | None,
    files.READ,
    typer.Option(
        "--against",
        metavar="SOURCE",
        autocompletion=parsing.complete_path,
        show_default=False,
        help="A model to compare the predictions with, usually the unquantized one.",
    ),
]
TextFile = Annotated[
    Path | None,
    files.READ,
    typer.Option("--text", metavar="FILE", show_default=False, exists=True, dir_okay=False, help="A text in UTF-8."),
]
TokenFile = Annotated[
    Path | None,
    files.READ,
    typer.Option(
        "--tokens",
        metavar="FILE",
        show_default=False,
        exists=True,
        dir_okay=False,
        help="Token ids, little-endian uint16 or uint32.",
    ),
]
Window = Annotated[int, typer.Option(metavar="N", min=2, help="Tokens read together.")]
Windows = Annotated[
    int | None, typer.Option(metavar="N", min=1, show_default="all", help="How many windows of the text to read.")
]
Save = Annotated[
    bool | None,
    typer.Option(
        "--save/--no-save",
        show_default="save scores of tasks",
        help="Write the result beside the quantized model, for its card and for inspect --html.",
    ),
]
Batch = Annotated[int, typer.Option(metavar="N", min=1, help="Windows, or samples of a task, read at once.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Where to compute. The output is the same everywhere. auto: a GPU if there is one."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python files that come with the model, if it needs them. Look at them first."
    ),
]
ComputeDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="To compute in. auto: that of the model's config."),
]
MaxTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Stop after so many tokens.")]
Temperature = Annotated[float, typer.Option(metavar="T", min=0.0, help="0: always the likeliest token.")]
OwnTemperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", metavar="T", min=0.0, show_default="the model's", help="0: always the likeliest token."
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", show_default=False, help="What the model is told first.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Start of the random numbers; the same seed draws the same text.")]
Module = Annotated[bool, typer.Option("--module", "-m", help="PROGRAM is a module, as after python -m.")]
UseTemplate = Annotated[
    bool,
    typer.Option("--chat", help="Put what is asked into the model's chat template, as a message of a user."),
]
