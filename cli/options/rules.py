"""Rules for single tensors, on the command line and in recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbitq.cli.options import files

PANEL = "Rules"

Rule = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P=DO",
        rich_help_panel=PANEL,
        show_default=False,
        help="DO: k4, trellis:k2/128, keep, scale=absmax, codebook=fit, or some with commas. The first that "
        "matches wins. Repeatable.",
    ),
]
Recipe = Annotated[
    Path | None,
    files.READ,
    typer.Option(metavar="FILE", rich_help_panel=PANEL, show_default=False, help="Rules and options from a TOML file."),
]
WriteRecipe = Annotated[
    Path | None,
    files.WRITTEN,
    files.READ,
    typer.Option(metavar="FILE", rich_help_panel=PANEL, show_default=False, help="Write what was chosen, as a recipe."),
]
