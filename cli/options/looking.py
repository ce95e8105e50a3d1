"""How ``inspect`` measures and what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kbitq.cli.options import files, parsing

PANEL = "Ways to look at it"

Against = Annotated[
    Path | None,
    files.READ,
    typer.Option(
        metavar="SRC",
        autocompletion=parsing.complete_path,
        show_default=False,
        help="Recompute the errors from this source instead of reading the recorded ones.",
    ),
]
Ks = Annotated[
    tuple,  # type: ignore[type-arg]  # typer takes tuple[int, ...] for several values, not for one that is parsed
    typer.Option(
        "--k", "-k", metavar="N,N,...", parser=parsing.ks, help="For a checkpoint not yet quantized: the K to try."
    ),
]
Sort = Annotated[
    Literal["name", "sqnr", "size"], typer.Option(help="By name, by SQNR (worst first), or by size (largest first).")
]
Sample = Annotated[
    bool, typer.Option("--sample", help="Measure a sample of each big tensor instead of all of it: quick, approximate.")
]
By = Annotated[
    Literal["tensor", "layer", "role"],
    typer.Option(rich_help_panel=PANEL, help="A line for each tensor, for each layer, or for each role over depth."),
]
Worst = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", rich_help_panel=PANEL, show_default=False, help="Only the N tensors of lowest SQNR."
    ),
]
Histograms = Annotated[
    bool,
    typer.Option("--histograms", rich_help_panel=PANEL, help="Count scale bytes and levels in use (reads everything)."),
]
Diff = Annotated[
    Path | None,
    files.READ,
    typer.Option(
        metavar="OTHER",
        rich_help_panel=PANEL,
        show_default=False,
        help="Compare with another quantization of the source.",
    ),
]
Html = Annotated[
    Path | None,
    files.WRITTEN,
    typer.Option(
        metavar="FILE",
        rich_help_panel=PANEL,
        show_default=False,
        help="Write a page that shows it all (with --against also the weights).",
    ),
]
