"""What is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kbitq import __version__
from kbitq.cli.console import console

PANEL = "What is printed"


def _print_version(wanted: bool) -> None:
    if wanted:
        console.data(f"kbitq {__version__}")
        raise typer.Exit


Json = Annotated[bool, typer.Option("--json", rich_help_panel=PANEL, help="One JSON object on stdout.")]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", rich_help_panel=PANEL, help="No progress; of the result only the path of the output."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", rich_help_panel=PANEL, help="Show the traceback of an error.")]
Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
]


@dataclass(frozen=True)
class Printing:
    """The three that nearly every command takes."""

    json: Json = False
    quiet: Quiet = False
    debug: Debug = False
