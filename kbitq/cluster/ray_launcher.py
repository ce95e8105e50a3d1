"""A Ray cluster carries a plan out: which workers there are, parts as tasks, progress from the journals, the end.

Placement, failure of nodes and retries are Ray's. A task is a part of one phase; there are twenty for each worker, so
that a slow one at the end holds the others up for a twentieth of its share. This process reads the journals, as any
other would: if it dies, Ray ends its tasks, and the same command goes on from what they wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import kbitq.errors
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.quantization import RunReport
from kbitq.checkpoint.source.progress import Progress
from kbitq.cluster.chunks import Chunk, Part
from kbitq.cluster.finishing import finish_job
from kbitq.cluster.job import Job
from kbitq.cluster.planning import save_plan
from kbitq.cluster.ray_nodes import RayOptions, Room, check_nodes, room_of
from kbitq.cluster.ray_phase import PhaseTasks
from kbitq.errors import ClusterError

PARTS_OF_A_WORKER = 20
HUB_WORKERS = 8  # at once, of a source that is read from the Hub, which limits the rate of requests
_MOST_ROUNDS = 3  # of one phase, each over what the one before has left
_LATE_SECONDS = 90.0  # until NFS shows what a task wrote
_ALIVE_SECONDS, _TELL_SECONDS = 30.0, 30.0


def quantize_on_ray(
    plan: Plan,
    options: RayOptions,
    progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, RunReport]:
    """Carry out a plan on a Ray cluster, going on from any attempt at it. Returns the plan with its budget spent, too.

    Raises:
        ClusterError: there is no cluster or no room in it, a node does not share the disk, or its workers keep dying.
        CheckpointError, NonFiniteError, BudgetError and others: as in ``run``; that of the first worker that has one.
    """
    ray = _ray()
    started = time.monotonic()
    ours = _connect(ray, options.address)
    try:
        room = room_of(ray, options)
        job = Job(save_plan(plan).path)
        check_nodes(ray, job, room.nodes)
        launcher = _Launcher(ray, job, options, room, progress, say)
        launcher.run()
        report = finish_job(launcher.job, None)
    finally:
        if ours:
            ray.shutdown()
    report.seconds = time.monotonic() - started
    return launcher.job.plan, report


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise ClusterError("the Python package 'ray' is missing", hint="pip install 'kbitq[ray]'") from None
    return ray


def _connect(ray: Any, address: str) -> bool:
    """Connect, unless the program is connected. Whether it was done here."""
    if ray.is_initialized():
        return False
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=None)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {kbitq.errors.first_line(error)}",
            hint="start a head node, and have the others join it",
            remedy="ray-start",
        ) from None
    return True


class _Launcher:
    def __init__(
        self,
        ray: Any,
        job: Job,
        options: RayOptions,
        room: Room,
        progress: Callable[[Progress], None] | None,
        say: Callable[[str], None],
    ) -> None:
        self.ray, self.job, self.options = ray, job, options
        self._progress, self._say = progress, say
        self._room = room
        self._slots = min(room.slots, HUB_WORKERS) if job.plan.checkpoint.storage.distant else room.slots
        self._told = time.monotonic()

    def run(self) -> None:
        """All phases."""
        self._say(f"{len(self._room.nodes)} nodes, {self._slots} workers of {self._room.cpus} cores at once")
        while True:
            phase, rounds = self.job.phase, 0
            while self.job.phase == phase and (missing := self.job.missing()):
                rounds += 1
                if rounds > _MOST_ROUNDS:
                    raise ClusterError(
                        f"the workers call the phase '{phase}' done, but {len(missing)} of its pieces are in none "
                        f"of the journals in {self.job.file.journals}",
                        hint="look whether all nodes see the same disk there",
                    )
                self._run_phase(phase, missing)
                self._await_journals(phase)
            if phase == "seal" and not self.job.missing():
                return

    def _run_phase(self, phase: str, missing: list[Chunk]) -> None:
        """Do what is missing of a phase, in parts, as tasks."""
        parts = PARTS_OF_A_WORKER * self._slots if self._slots > 1 else 1  # a single worker holds nobody up
        count = min(len(self.job.chunks), parts)
        lacking = {c.key for c in missing}
        all_parts = (Part(i, count) for i in range(count))
        waiting = [part for part in all_parts if any(c.key in lacking for c in part.of(self.job.chunks))]
        limited = self.options.workers is not None or self.job.plan.checkpoint.storage.distant
        most = self._slots if limited else 2 * self._slots  # one more each, so that no worker waits for this process
        PhaseTasks(self.ray, self.job, self.options, self._room, self._say).run(phase, waiting, most, self._tell)

    def _await_journals(self, phase: str) -> None:
        """Return when the journals say that the phase is complete, or after as long as NFS may need to show it."""
        until = time.monotonic() + _LATE_SECONDS
        while True:
            self.job.update()
            if self.job.phase != phase or not self.job.missing() or time.monotonic() > until:
                return
            time.sleep(0.2)

    def _tell(self) -> None:
        now = time.monotonic()
        alive = sum(now - a.grew < _ALIVE_SECONDS for a in self.job.journals.attempts.values())
        if self._progress is not None:
            done, total = self.job.bytes_done()
            self._progress(Progress(done, total, f"{alive} workers, phase {self.job.phase}"))
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            self._say(f"{min(alive, self._slots)} workers are at work on the phase '{self.job.phase}'")
