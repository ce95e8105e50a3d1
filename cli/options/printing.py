"""What is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kbitq import __version__
from kbitq.cli.console import console
from kbitq.cli.options.panels import MAIN, Panel

_PANEL = Panel("What is printed")


def _print_version(wanted: bool) -> None:
    if wanted:
        console.data(f"kbitq {__version__}")
        raise typer.Exit


Json = Annotated[bool, _PANEL.flag("One JSON object on stdout.", "--json")]
Quiet = Annotated[bool, _PANEL.flag("No progress; of the result only the path of the output.", "--quiet", "-q")]
Debug = Annotated[bool, _PANEL.flag("Show the traceback of an error.", "--debug")]
Version = Annotated[bool, MAIN.flag("Show the version and exit.", "--version", callback=_print_version, is_eager=True)]


@dataclass(frozen=True)
class Printing:
    """The three that nearly every command takes."""

    json: Json = False
    quiet: Quiet = False
    debug: Debug = False
