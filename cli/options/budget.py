"""Bits or bytes to spend, instead of one K."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kbitq.cli.options import parsing

PANEL = "A budget instead of one K"

Bpw = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        parser=parsing.bits,
        rich_help_panel=PANEL,
        show_default=False,
        help="Choose K by tensor: at most X bits per quantized weight, codebooks not counted.",
    ),
]
Size = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=parsing.size,
        rich_help_panel=PANEL,
        show_default=False,
        help="Choose K by tensor: all weight files together, kept tensors too, take at most SIZE (20GiB, 500MB).",
    ),
]
Error = Annotated[
    Literal["auto", "balanced", "outputs", "importance", "relative", "none"],
    typer.Option(
        rich_help_panel=PANEL,
        help="Made small: each tensor's error relative to its weights, that of its layer's outputs by --calibration, "
        "that weighted by --importance, that with all tensors counting the same, or the plain sum. "
        "auto: outputs with --calibration, else balanced.",
    ),
]
Weight = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P=F",
        rich_help_panel=PANEL,
        show_default=False,
        help="The error of tensors that P matches counts F times. Repeatable.",
    ),
]
Tie = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P",
        rich_help_panel=PANEL,
        show_default=False,
        help="One K for all that P matches (for each value of the groups of a re:REGEX). Repeatable.",
    ),
]
Sample = Annotated[
    bool,
    typer.Option("--sample", rich_help_panel=PANEL, help="Measure a sample of each big tensor: quick, approximate."),
]
