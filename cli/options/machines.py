"""Many machines: a plan in a file, its parts, and launchers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kbitq.cli.options import files, parsing
from kbitq.cli.options.arguments import place
from kbitq.cli.options.panels import MAIN, Panel

_PANEL = Panel("Many machines")

PlanFile = Annotated[Path, files.READ, place("PLAN", "The file that kbitq plan --save wrote.")]
SavePlan = Annotated[
    Path | None,
    files.WRITTEN,
    _PANEL.path(
        "PLAN",
        "Write the plan to a file whose parts kbitq work does, on any machine that shares the disk; make the "
        "files of the output at full size.",
        "--save",
    ),
]
PartOf = Annotated[
    str | None,
    MAIN.option(
        "I/N",
        "Which of N equal parts to do, counted from 0.",
        "--part",
        shown="RANK/WORLD_SIZE, or the task of a Slurm array",
    ),
]
Device = Annotated[
    str | None,
    MAIN.option(
        "DEVICE",
        "auto, cpu, cuda, or GPUs as cuda:0,cuda:1. The output is the same everywhere.",
        "--device",
        parser=parsing.devices,
        shown="the plan's",
    ),
]
Patience = Annotated[
    float,
    MAIN.option(
        "SECONDS",
        "Where other parts are waited for and none gives a sign for so long, do what they have not done.",
        "--patience",
        min=0.0,
    ),
]
Cluster = Annotated[
    str | None,
    _PANEL.option(
        "WHERE",
        "Let a Ray cluster do it: auto, or its address. slurm: print a script that has it done as an array job.",
        "--cluster",
    ),
]
GpusPerWorker = Annotated[int, _PANEL.option("N", "0: compute on CPUs.", "--gpus-per-worker", min=0)]
CpusPerWorker = Annotated[
    int | None,
    _PANEL.option("N", "Cores of a worker.", "--cpus-per-worker", min=1, shown="as many as the smallest node has"),
]
Workers = Annotated[
    int | None,
    _PANEL.option(
        "N",
        "At most so many at once; tasks of the Slurm array.",
        "--workers",
        min=1,
        shown="as many as fit; of Slurm 16",
    ),
]
Stall = Annotated[
    float,
    _PANEL.option(
        "SECONDS",
        "A worker of a Ray cluster that makes no progress for so long is ended and its part begun again.",
        "--stall",
        min=1.0,
    ),
]
