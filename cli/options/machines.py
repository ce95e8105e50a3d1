"""Many machines: a plan in a file, its parts, and launchers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbitq.cli.options import files, parsing
from kbitq.cli.options.arguments import place

PANEL = "Many machines"

PlanFile = Annotated[
    Path,
    files.READ,
    place("PLAN", "The file that kbitq plan --save wrote."),
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
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="WHERE",
        rich_help_panel=PANEL,
        show_default=False,
        help="Let a Ray cluster do it: auto, or its address. slurm: print a script that has it done as an array job.",
    ),
]
GpusPerWorker = Annotated[
    int,
    typer.Option("--gpus-per-worker", metavar="N", min=0, rich_help_panel=PANEL, help="0: compute on CPUs."),
]
CpusPerWorker = Annotated[
    int | None,
    typer.Option(
        "--cpus-per-worker",
        metavar="N",
        min=1,
        rich_help_panel=PANEL,
        show_default="as many as the smallest node has",
        help="Cores of a worker.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        rich_help_panel=PANEL,
        show_default="as many as fit; of Slurm 16",
        help="At most so many at once; tasks of the Slurm array.",
    ),
]
Stall = Annotated[
    float,
    typer.Option(
        "--stall",
        metavar="SECONDS",
        min=1.0,
        rich_help_panel=PANEL,
        help="A worker of a Ray cluster that makes no progress for so long is ended and its part begun again.",
    ),
]
