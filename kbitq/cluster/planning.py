"""``save_plan``: everything that is needed before machines begin: the plan's file, and its output at full size."""

from __future__ import annotations

import shutil
from pathlib import Path

from kbitq.checkpoint.allocation import check_budget
from kbitq.checkpoint.output.file_writer import sync_folder
from kbitq.checkpoint.output.staging import SharedStaging, working_folders
from kbitq.checkpoint.passes.resume import take_up
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.planner import check_output
from kbitq.cluster.pages import SharedFile
from kbitq.cluster.plan_file import PlanFile, plan_content, write_plan_file
from kbitq.codecs.base import any_parts
from kbitq.errors import SelectionError
from kbitq.format import FORMAT_VERSION

OWN_NAME = "plan.json"


def save_plan(plan: Plan, path: str | Path | None = None, *, chunk_bytes: int | None = None) -> PlanFile:
    """Write the file of a plan, and make the files of its output, at full size, in the hidden folder beside ``out``.

    The same plan again goes on with what is there. Reads headers and a few kilobytes of each file.

    Args:
        plan: of a run, without a budget spent.
        path: of the file; None: in the hidden folder.
        chunk_bytes: of the source in a piece of work; None chooses.

    Raises:
        CheckpointError: the output is taken, another run has its hidden folder (unless ``force``), or it cannot be
            written. NoSpaceError: the disk is too small.
    """
    check_output(plan)
    _check_format(plan)
    if plan.options.budget is not None:
        check_budget(plan, plan.options.budget)
    content = plan_content(plan, chunk_bytes)
    staging = SharedStaging(Path(content["out"]))
    with staging:
        key = {"format_version": FORMAT_VERSION, "name": plan.out.name, "plan file": content["hash"]}
        _, journal = take_up(plan, staging, key)
        journal.close()
        staging.check_space(plan.disk_needed)
        missing = [shard for shard in plan.shards if not staging.path(shard.name).exists()]
        parts = staging.folder / "parts"
        if missing:  # an earlier run was published, or its files removed: what its journals say is no longer so
            shutil.rmtree(parts, ignore_errors=True)
        for shard in missing:
            SharedFile(staging.path(shard.name), shard.nbytes).close()
        parts.mkdir(exist_ok=True)
        sync_folder(staging.output)
        sync_folder(staging.folder)
    return write_plan_file(content, own_path(plan) if path is None else Path(path))


def _check_format(plan: Plan) -> None:
    """Raise SelectionError for a format whose parts several machines cannot write at once."""
    if plan.output is None:
        return
    turned = any(part.turned for part in any_parts(plan.output.name))
    if turned or plan.settles or plan.least_tile:
        raise SelectionError(
            f"the format {plan.output.output} is written by one machine: its parts are not cut as rows of a matrix are",
            hint="compressed-tensors, int8, fp8 and kbitq's own format can be shared out",
        )


def own_path(plan: Plan) -> Path:
    """The file of a plan in the hidden folder of its output."""
    return working_folders(plan.out)[0] / OWN_NAME
