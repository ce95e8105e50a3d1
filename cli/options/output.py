"""Where a checkpoint is written, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kbitq.cli.options import files, parsing

PANEL = "Output"

Output = Annotated[
    Path | None,
    files.OUTPUT,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        rich_help_panel=PANEL,
        autocompletion=parsing.complete_path,
        show_default="beside SRC, NAME-kbitq-kN",
        help="A name ending in .safetensors is a file, any other a folder.",
    ),
]
RequiredOutput = Annotated[
    Path,
    files.OUTPUT,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        rich_help_panel=PANEL,
        autocompletion=parsing.complete_path,
        show_default=False,
        help="A name ending in .safetensors is a file, any other a folder.",
    ),
]
MaxShardSize = Annotated[
    int,
    typer.Option(
        metavar="SIZE",
        parser=parsing.size,
        rich_help_panel=PANEL,
        help="Largest file of a folder: 500MB, 5GB (powers of 1000), 2GiB (of 1024).",
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "float64"] | None,
    typer.Option(
        rich_help_panel=PANEL, show_default="each tensor's own", help="Write the restored tensors in this dtype."
    ),
]
Force = Annotated[bool, typer.Option("--force", rich_help_panel=PANEL, help="Replace an output that exists.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", rich_help_panel=PANEL, help="Show the plan, as kbitq plan does; write nothing.")
]
