"""What a model is calibrated on, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from kbitq.cli.options import files, parsing
from kbitq.cli.options.arguments import place
from kbitq.cli.options.panels import MAIN

Model = Annotated[
    Path, files.READ, place("MODEL", "The folder of an unquantized model of transformers, or ORG/NAME of the Hub.")
]
Texts = Annotated[
    list[Path],
    files.READ,
    MAIN.file(
        "A text in UTF-8, a .jsonl of objects with a text, or a .tokens of uint16 or uint32 ids. Repeatable.", "--text"
    ),
]
Field = Annotated[str, MAIN.option("NAME", "What holds the text in the objects of a .jsonl file.")]
Samples = Annotated[int, MAIN.option("N", "Windows of tokens to draw from the texts.", min=1)]
Length = Annotated[int, MAIN.option("N", "Tokens of a window.", min=2)]
Seed = Annotated[int, MAIN.option("N", "Of the drawing: the same seed draws the same windows.", min=0)]
HessianBlock = Annotated[
    int,
    MAIN.option(
        "N", "Of an input with more columns, only blocks of so many on the diagonal are kept. 0: keep all.", min=0
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    MAIN.option(None, "Where to run the model. The last digits of the sums depend on it. auto: a GPU if there is one."),
]
MaxMemory = Annotated[
    int | None,
    MAIN.option(
        "SIZE",
        "Keep within this much memory beyond the interpreter: 8GB, 2GiB. A model that does not fit is run layer "
        "by layer.",
        parser=parsing.size,
        shown="what is free",
    ),
]
Output = Annotated[Path, files.OUTPUT, MAIN.path("OUT", "The folder of statistics to write.", "-o", "--output")]
