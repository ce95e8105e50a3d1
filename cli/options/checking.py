"""What ``verify`` compares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kbitq.cli.options import files
from kbitq.cli.options.panels import MAIN

MadeFrom = Annotated[
    Path | None,
    files.READ,
    MAIN.path("SRC", "What it was quantized from: tensors are quantized again and the bytes compared.", "--source"),
]
Full = Annotated[bool, MAIN.flag("Compare every tensor with the source.", "--full")]
SampleCount = Annotated[
    int | None, MAIN.option("N", "Compare N quantized tensors with the source.", "--sample", min=1, shown="8")
]
UsedImportance = Annotated[
    Path | None,
    files.READ,
    MAIN.option(
        "FILE",
        "The importance file that it was quantized with: tensors made with it are made again too.",
        "--importance",
    ),
]
RepairIndex = Annotated[
    bool, MAIN.flag("First write the index of the shards anew, from their headers.", "--repair-index")
]
