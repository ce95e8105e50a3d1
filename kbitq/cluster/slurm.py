"""The script that has a saved plan carried out by Slurm: an array of parts, and a job that completes the output."""

from __future__ import annotations

import shlex
import sys

from kbitq.cluster.plan_file import PlanFile
from kbitq.errors import CheckpointError

DEFAULT_TASKS = 16


def slurm_script(file: PlanFile, tasks: int = DEFAULT_TASKS, gpus: int = 0, cpus: int | None = None) -> str:
    """A script for ``sh``. The work goes to every node that Slurm gives; each task of the array does one part.

    Args:
        file: the plan, on a disk that all nodes see.
        tasks: of the array.
        gpus: of a task.
        cpus: of a task; None: as the cluster gives them.

    Raises CheckpointError for a path that no script can name.
    """
    if "\n" in str(file.path) or "\n" in sys.executable:
        raise CheckpointError(f"{str(file.path)!r} has a line break, which a script for Slurm cannot name")
    program = f"{shlex.quote(sys.executable)} -m kbitq.cli.start"
    plan, name = shlex.quote(str(file.path.absolute())), shlex.quote(f"kbitq-{file.out.name}")
    wanted = ([f"--gpus-per-task={gpus}"] if gpus else []) + ([f"--cpus-per-task={cpus}"] if cpus is not None else [])
    lines = [
        "#!/bin/sh",
        f"# For sh, where sbatch is. Task I of the array does part I of {tasks}; one that is cut off (preempted)",
        "# is queued again and goes on from what it wrote. To have done what is missing, run the script again.",
        "set -eu",
        " ".join([
            f"parts=$(sbatch --parsable --job-name={name} --array=0-{tasks - 1} --requeue --open-mode=append", *wanted,
            "<<'PART'",
        ]),
        "#!/bin/sh",
        f"exec {program} work {plan}" + (" --device cuda" if gpus else ""),
        "PART",
        ")",
        f'sbatch --dependency=afterok:"$parts" --job-name={name}-finish <<\'FINISH\'',
        "#!/bin/sh",
        f"exec {program} finish {plan}",
        "FINISH",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
