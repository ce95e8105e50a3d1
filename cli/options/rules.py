"""Rules for single tensors, on the command line and in recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kbitq.cli.options import files
from kbitq.cli.options.panels import Panel

_PANEL = Panel("Rules")

Rule = Annotated[
    list[str] | None,
    _PANEL.option(
        "P=DO",
        "DO: k4, trellis:k2/128, keep, scale=absmax, codebook=fit, or some with commas. The first that "
        "matches wins. Repeatable.",
    ),
]
Recipe = Annotated[Path | None, files.READ, _PANEL.option("FILE", "Rules and options from a TOML file.")]
WriteRecipe = Annotated[
    Path | None, files.WRITTEN, files.READ, _PANEL.option("FILE", "Write what was chosen, as a recipe.")
]
