"""Tasks of the lm-evaluation-harness: ``eval --tasks`` and what goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kbitq.cli.options import files
from kbitq.cli.options.panels import Panel

_PANEL = Panel("Tasks")

Names = Annotated[
    str | None,
    _PANEL.option(
        "NAME,...", "Tasks of the lm-evaluation-harness (pip install 'lm-eval\\[hf]') instead of a text.", "--tasks"
    ),
]
Shots = Annotated[int | None, _PANEL.option("N", "Examples before each sample.", min=0, shown="the task's")]
Limit = Annotated[int | None, _PANEL.option("N", "Samples of each task to read.", min=1, shown="all")]
Folder = Annotated[
    Path | None,
    files.READ,
    _PANEL.option(
        "DIR", "A folder with tasks of your own, as YAML files.", "--include-path", exists=True, file_okay=False
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
