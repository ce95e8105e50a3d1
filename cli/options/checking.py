"""What ``verify`` compares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbitq.cli.options import files, parsing

MadeFrom = Annotated[
    Path | None,
    files.READ,
    typer.Option(
        "--source",
        metavar="SRC",
        autocompletion=parsing.complete_path,
        show_default=False,
        help="What it was quantized from: tensors are quantized again and the bytes compared.",
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Compare every tensor with the source.")]
SampleCount = Annotated[
    int | None,
    typer.Option("--sample", metavar="N", min=1, show_default="8", help="Compare N quantized tensors with the source."),
]
UsedImportance = Annotated[
    Path | None,
    files.READ,
    typer.Option(
        "--importance",
        metavar="FILE",
        show_default=False,
        help="The importance file that it was quantized with: tensors made with it are made again too.",
    ),
]
RepairIndex = Annotated[
    bool, typer.Option("--repair-index", help="First write the index of the shards anew, from their headers.")
]
