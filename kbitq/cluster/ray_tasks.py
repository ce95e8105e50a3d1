"""What runs on the nodes of a Ray cluster: a part of one phase, and a look whether the node sees the shared disk.

Only paths, numbers and sentences travel through Ray; weights never do. Errors come back as values, since not every
class of them survives pickling.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from kbitq.cluster.attempts import Attempt
from kbitq.cluster.chunks import Part
from kbitq.cluster.job import Job
from kbitq.cluster.worker import run_chunks
from kbitq.errors import BuildError, CheckpointError, KbitqError, NoSpaceError

_JOBS: dict[tuple[str, str, int, int], Job] = {}  # the last one: Ray gives a process one task after the other
_GPUS: list[str] = []  # those that this process computes on, as the first task with any had them

Outcome = dict[str, Any]


def do_part(path: str, phase: str, index: int, count: int, device: str) -> Outcome:
    """Do part ``index`` of ``count`` of a phase, whatever of it is not done yet. Returns an error, or nothing.

    Raises OSError where the system failed, which another attempt may survive.
    """
    try:
        _take_devices(device)
        job = _job(path, device)
        if job.phase == phase:
            name = label(phase, Part(index, count))
            with Attempt(job.file.journals, job.file.hash, name, _node()) as attempt:
                # Where there are several, none waits at its end for the sum of one file: sums are parts of their own.
                run_chunks(job, Part(index, count), attempt, seals=count == 1)
    except KbitqError as error:
        _JOBS.clear()
        if isinstance(error.__context__, OSError) and not isinstance(error, NoSpaceError):
            raise OSError(error.__context__.errno, str(error)) from None
        return _told(error, f"{socket.gethostname()}: " if isinstance(error, BuildError) else "")
    except BaseException:
        _JOBS.clear()
        raise
    return {}


def _take_devices(device: str) -> None:
    """Compute with what Ray gives this task: the environment says which GPUs these are, and how many cores.

    A process gets one task after another. It may have begun with fewer threads; but CUDA keeps to the GPUs that it
    found first, and so a process whose task got others ends, and Ray gives the task to another one.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))
    if device == "cpu":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not _GPUS:
        _GPUS.append(visible)
    elif [visible] != _GPUS:
        os._exit(0)


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
        made = Path(f"{probe}-{secrets.token_hex(8)}")
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


def _told(error: KbitqError, lead: str = "") -> Outcome:
    kind = type(error).__name__
    given = {"hint": error.hint, "argument": error.argument, "remedy": error.remedy}
    return {
        "error": kind,
        "message": lead + str(error),
        "given": {**given, "data": {k: str(v) for k, v in error.data.items()}},
    }
