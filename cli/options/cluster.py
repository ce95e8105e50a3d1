"""Many machines: a plan in a file, its parts, and launchers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbitq.cli.options import files, parsing

PANEL = "Many machines"

PlanFile = Annotated[
    Path,
    files.READ,
    typer.Argument(
        metavar="PLAN",
        help="The file that kbitq plan --save wrote.",
        autocompletion=parsing.complete_path,
        show_default=False,
    ),
]
SavePlan = Annotated[
    Path | None,
    files.WRITTEN,
    typer.Option(
        "--save",
        metavar="PLAN",
        rich_help_panel=PANEL,
        autocompletion=parsing.complete_path,
        show_default=False,
        help="Write the plan to a file whose parts kbitq work does, on any machine that shares the disk; make the "
        "files of the output at full size.",
    ),
]
PartOf = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="I/N",
        show_default="RANK/WORLD_SIZE, or the task of a Slurm array",
        help="Which of N equal parts to do, counted from 0.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        parser=parsing.devices,
        show_default="the plan's",
        help="auto, cpu, cuda, or GPUs as cuda:0,cuda:1. The output is the same everywhere.",
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience",
        metavar="SECONDS",
        min=0.0,
        help="Where other parts are waited for and none gives a sign for so long, do what they have not done.",
    ),
]
