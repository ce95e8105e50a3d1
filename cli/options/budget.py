"""Bits or bytes to spend, instead of one K."""

from __future__ import annotations

from typing import Annotated, Literal

from kbitq.cli.options import parsing
from kbitq.cli.options.panels import Panel

PANEL = Panel("A budget instead of one K")

Bpw = Annotated[
    float | None,
    PANEL.option(
        "X", "Choose K by tensor: at most X bits per quantized weight, codebooks not counted.", parser=parsing.bits
    ),
]
Size = Annotated[
    int | None,
    PANEL.option(
        "SIZE",
        "Choose K by tensor: all weight files together, kept tensors too, take at most SIZE (20GiB, 500MB).",
        parser=parsing.size,
    ),
]
Error = Annotated[
    Literal["auto", "balanced", "outputs", "importance", "relative", "none"],
    PANEL.option(
        None,
        "Made small: each tensor's error relative to its weights, that of its layer's outputs by --calibration, "
        "that weighted by --importance, that with all tensors counting the same, or the plain sum. "
        "auto: outputs with --calibration, else balanced.",
    ),
]
Weight = Annotated[
    list[str] | None, PANEL.option("P=F", "The error of tensors that P matches counts F times. Repeatable.")
]
Tie = Annotated[
    list[str] | None,
    PANEL.option("P", "One K for all that P matches (for each value of the groups of a re:REGEX). Repeatable."),
]
Sample = Annotated[bool, PANEL.flag("Measure a sample of each big tensor: quick, approximate.", "--sample")]
