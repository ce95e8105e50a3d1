"""Tasks of the lm-evaluation-harness: ``eval --tasks`` and what goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kbitq.cli.options import files

PANEL = "Tasks"

Names = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="NAME,...",
        rich_help_panel=PANEL,
        show_default=False,
        help="Tasks of the lm-evaluation-harness (pip install 'lm-eval\\[hf]') instead of a text.",
    ),
]
Shots = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, rich_help_panel=PANEL, show_default="the task's", help="Examples before each sample."
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, rich_help_panel=PANEL, show_default="all", help="Samples of each task to read."),
]
Folder = Annotated[
    Path | None,
    files.READ,
    typer.Option(
        "--include-path",
        metavar="DIR",
        rich_help_panel=PANEL,
        show_default=False,
        exists=True,
        file_okay=False,
        help="A folder with tasks of your own, as YAML files.",
    ),
]


@dataclass(frozen=True)
class Wanted:
    """Which tasks, and how."""

    tasks: Names = None
    shots: Shots = None
    limit: Limit = None
    include_path: Folder = None

    @property
    def names(self) -> list[str]:
        """The names of ``--tasks``; none without it."""
        return [name for part in (self.tasks or "").split(",") if (name := part.strip())]

    def check(self) -> None:
        """A usage error where options of tasks are given and no task is."""
        if self.tasks is None and (self.shots, self.limit, self.include_path) != (None, None, None):
            raise typer.BadParameter("--shots, --limit and --include-path go with --tasks NAME,...")
        if self.tasks is not None and not self.names:
            raise typer.BadParameter("--tasks names no task.")
