"""How ``inspect`` measures and what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from kbitq.cli.options import files, parsing
from kbitq.cli.options.panels import MAIN, Panel

_PANEL = Panel("Ways to look at it")

Against = Annotated[
    Path | None,
    files.READ,
    MAIN.path("SRC", "Recompute the errors from this source instead of reading the recorded ones."),
]
Ks = Annotated[
    tuple,  # type: ignore[type-arg]  # typer takes tuple[int, ...] for several values, not for one that is parsed
    MAIN.option("N,N,...", "For a checkpoint not yet quantized: the K to try.", "--k", "-k", parser=parsing.ks),
]
Sort = Annotated[
    Literal["name", "sqnr", "size"], MAIN.option(None, "By name, by SQNR (worst first), or by size (largest first).")
]
Sample = Annotated[
    bool, MAIN.flag("Measure a sample of each big tensor instead of all of it: quick, approximate.", "--sample")
]
By = Annotated[
    Literal["tensor", "layer", "role"],
    _PANEL.option(None, "A line for each tensor, for each layer, or for each role over depth."),
]
Worst = Annotated[int | None, _PANEL.option("N", "Only the N tensors of lowest SQNR.", min=1)]
Histograms = Annotated[bool, _PANEL.flag("Count scale bytes and levels in use (reads everything).", "--histograms")]
Diff = Annotated[Path | None, files.READ, _PANEL.option("OTHER", "Compare with another quantization of the source.")]
Html = Annotated[
    Path | None,
    files.WRITTEN,
    _PANEL.option("FILE", "Write a page that shows it all (with --against also the weights)."),
]
