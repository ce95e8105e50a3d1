"""What a model is calibrated on, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kbitq.cli.options import files, parsing
from kbitq.cli.options.arguments import place

Model = Annotated[
    Path,
    files.READ,
    place("MODEL", "The folder of an unquantized model of transformers, or ORG/NAME of the Hub."),
]
Texts = Annotated[
    list[Path],
    files.READ,
    typer.Option(
        "--text",
        metavar="FILE",
        show_default=False,
        exists=True,
        dir_okay=False,
        help="A text in UTF-8, a .jsonl of objects with a text, or a .tokens of uint16 or uint32 ids. Repeatable.",
    ),
]
Field = Annotated[str, typer.Option(metavar="NAME", help="What holds the text in the objects of a .jsonl file.")]
Samples = Annotated[int, typer.Option(metavar="N", min=1, help="Windows of tokens to draw from the texts.")]
Length = Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of a window.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of the drawing: the same seed draws the same windows.")]
HessianBlock = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Of an input with more columns, only blocks of so many on the diagonal are kept. 0: keep all.",
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Where to run the model. The last digits of the sums depend on it. auto: a GPU if there is one."),
]
MaxMemory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=parsing.size,
        show_default="what is free",
        help="Keep within this much memory beyond the interpreter: 8GB, 2GiB. A model that does not fit is run layer "
        "by layer.",
    ),
]
Output = Annotated[
    Path,
    files.OUTPUT,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        autocompletion=parsing.complete_path,
        show_default=False,
        help="The folder of statistics to write.",
    ),
]
