"""What runs on the nodes of a Ray cluster: a part of one phase, and a look whether the node sees the shared disk.

Only paths, numbers and sentences travel through Ray; weights never do. Errors come back as values, since not every
class of them survives pickling.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from kbitq.cluster.attempts import Attempt
from kbitq.cluster.chunks import Part
from kbitq.cluster.job import Job
from kbitq.cluster.worker import run_chunks
from kbitq.errors import CheckpointError, KbitqError, NoSpaceError

_JOBS: dict[tuple[str, str, int, int], Job] = {}  # the last one: Ray gives a process one task after the other

Outcome = dict[str, Any]


def do_part(path: str, phase: str, index: int, count: int, device: str) -> Outcome:
    """Do part ``index`` of ``count`` of a phase, whatever of it is not done yet. Returns an error, or nothing.

    Raises OSError where the system failed, which another attempt may survive.
    """
    try:
        job = _job(path, device)
        if job.phase == phase:
            name = label(phase, Part(index, count))
            with Attempt(job.file.journals, job.file.hash, name, _node()) as attempt:
                run_chunks(job, Part(index, count), attempt)
    except KbitqError as error:
        _JOBS.clear()
        if isinstance(error.__context__, OSError) and not isinstance(error, NoSpaceError):
            raise OSError(error.__context__.errno, str(error)) from None
        return _told(error)
    except BaseException:
        _JOBS.clear()
        raise
    return {}


def label(phase: str, part: Part) -> str:
    """What the journal of an attempt at a part of one phase says it is."""
    return f"{phase} {part}"


def end(pid: int) -> None:
    """End a worker of this node that hangs, with a signal that it need not hear. Never another process."""
    try:
        if b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        return  # it has gone


def _node() -> str:
    """What Ray calls this node; nothing outside of Ray."""
    ray = sys.modules.get("ray")
    return str(ray.get_runtime_context().get_node_id()) if ray is not None and ray.is_initialized() else ""


def look(path: str, probe: str, device: str) -> Outcome:
    """Whether this node sees ``probe`` (a file of one line), may write beside it, and comes to the same plan.

    Returns ``seen``, the line; ``made``, the name of a file that it wrote with that line; or an error.
    """
    try:
        seen = Path(probe).read_text()
        made = Path(probe).with_name(f"probe-{secrets.token_hex(8)}")
        made.write_text(seen)
    except OSError as error:
        return {"seen": "", "made": "", "why": error.strerror or str(error)}
    try:
        _job(path, device)
    except KbitqError as error:
        return _told(error)
    return {"seen": seen, "made": made.name}


def _job(path: str, device: str) -> Job:
    """The job of a plan. A plan saved anew at the same place, after an earlier run has ended, is another job."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    key = path, device, status.st_ino, status.st_mtime_ns
    if key not in _JOBS:
        _JOBS.clear()
        _JOBS[key] = Job(Path(path), device)
    job = _JOBS[key]
    job.update()
    return job


def _told(error: KbitqError) -> Outcome:
    kind = type(error).__name__
    given = {"hint": error.hint, "argument": error.argument, "remedy": error.remedy}
    return {
        "error": kind,
        "message": str(error),
        "given": {**given, "data": {k: str(v) for k, v in error.data.items()}},
    }
