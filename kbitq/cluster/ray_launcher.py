"""A Ray cluster carries a plan out: which workers there are, parts as tasks, progress from the journals, the end.

Placement, failure of nodes and retries are Ray's. A task is a part of one phase; there are twenty for each worker, so
that a slow one at the end holds the others up for a twentieth of its share. This process reads the journals, as any
other would: if it dies, Ray ends its tasks, and the same command goes on from what they wrote.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kbitq.errors
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.quantization import RunReport
from kbitq.checkpoint.source.progress import Progress
from kbitq.cluster import ray_tasks
from kbitq.cluster.attempts import Follower
from kbitq.cluster.chunks import Chunk, Part
from kbitq.cluster.finishing import finish_job
from kbitq.cluster.job import Job
from kbitq.cluster.planning import save_plan
from kbitq.errors import ClusterError, KbitqError

PARTS_OF_A_WORKER = 20
HUB_WORKERS = 8  # at once, of a source that is read from the Hub, which limits the rate of requests
STALL_SECONDS = 600.0
_RETRIES = 10  # of a task whose node died or whose system failed
_MOST_STALLS = 3  # of one part
_MOST_ROUNDS = 3  # of one phase, each over what the one before has left
_LATE_SECONDS = 90.0  # until NFS shows what a task wrote
_ALIVE_SECONDS, _TELL_SECONDS = 30.0, 30.0


@dataclass(frozen=True)
class RayOptions:
    """How a Ray cluster is used.

    Attributes:
        address: ``auto``, that of the head node, or ``local``: a cluster of this machine alone, for this run.
        gpus_per_worker: 0 computes on CPUs.
        cpus_per_worker: cores of a worker; None: all of the smallest node, shared among its GPUs.
        workers: at most so many at once; None: as many as there is room for.
        stall: seconds without progress after which a worker is ended and its part begun again.
    """

    address: str = "auto"
    gpus_per_worker: int = 0
    cpus_per_worker: int | None = None
    workers: int | None = None
    stall: float = STALL_SECONDS


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
    file = save_plan(plan)
    ours = _connect(ray, options.address)
    try:
        launcher = _Launcher(ray, Job(file.path), options, progress, say)
        launcher.check_nodes()
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


@dataclass
class _Task:
    """A task in flight."""

    part: Part
    submitted: float


class _Launcher:
    def __init__(
        self,
        ray: Any,
        job: Job,
        options: RayOptions,
        progress: Callable[[Progress], None] | None,
        say: Callable[[str], None],
    ) -> None:
        self.ray, self.job, self.options = ray, job, options
        self._progress, self._say = progress, say
        self._device = "cuda" if options.gpus_per_worker else "cpu"
        self._nodes = self._nodes_with_room()
        self._cpus = self._cpus_per_worker()
        self._slots = sum(self._room(node) for node in self._nodes)
        if not self._slots:
            raise ClusterError(
                f"no node of the Ray cluster has room for a worker of {self._cpus} cores and "
                f"{options.gpus_per_worker} GPUs",
                hint="ray status shows what the nodes have",
            )
        if options.workers is not None:
            self._slots = min(self._slots, options.workers)
        if job.plan.checkpoint.storage.distant:
            self._slots = min(self._slots, HUB_WORKERS)
        self._stalls: Counter[str] = Counter()
        self._told = time.monotonic()

    def check_nodes(self) -> None:
        """Before any work: does every node see the disk that this one sees, and come to the same plan?"""
        probe = self.job.file.journals / f"probe-{secrets.token_hex(8)}"
        line = secrets.token_hex(16)
        probe.write_text(line)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        look = self.ray.remote(ray_tasks.look)
        try:
            asked = {
                node["NodeManagerAddress"] + " " + node["NodeID"][:8]: look.options(
                    num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                ).remote(str(self.job.file.path), str(probe), "cpu")
                for node in self._nodes
            }
            for name, answer in asked.items():
                self._check_answer(name, self._answer(name, answer), line)
        finally:
            for left in self.job.file.journals.glob("probe-*"):
                left.unlink(missing_ok=True)

    def run(self) -> None:
        """All phases."""
        self._say(f"{len(self._nodes)} nodes, {self._slots} workers of {self._cpus} cores at once")
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

    def _answer(self, name: str, answer: Any) -> Any:
        try:
            return self.ray.get(answer, timeout=180)
        except Exception as error:  # whatever Ray or the node's Python has to say
            raise ClusterError(
                f"node {name} cannot run kbitq: {kbitq.errors.first_line(error)}",
                hint="install the same kbitq, Python and Ray on every node",
            ) from None

    def _check_answer(self, name: str, answer: dict[str, Any], line: str) -> None:
        if "error" in answer:
            raise _raised(answer, f"node {name}: ")
        beside = self.job.file.journals / (answer["made"] or "probe-")
        try:
            shared = answer["seen"] == line and beside.read_text() == line
        except OSError:
            shared = False
        if not shared:
            raise ClusterError(
                f"node {name} does not share the disk of {self.job.file.out}"
                + (f" ({answer['why']})" if answer.get("why") else ""),
                hint="put the output on a disk that all nodes see under one path",
            )

    def _run_phase(self, phase: str, missing: list[Chunk]) -> None:
        """Do what is missing of a phase, in parts, as tasks."""
        parts = PARTS_OF_A_WORKER * self._slots if self._slots > 1 else 1  # a single worker holds nobody up
        count = min(len(self.job.chunks), parts)
        lacking = {c.key for c in missing}
        all_parts = (Part(i, count) for i in range(count))
        waiting = deque(part for part in all_parts if any(c.key in lacking for c in part.of(self.job.chunks)))
        running: dict[Any, _Task] = {}
        limited = self.options.workers is not None or self.job.plan.checkpoint.storage.distant
        most = self._slots if limited else 2 * self._slots  # one more each, so that no worker waits for this process
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    part = waiting.popleft()
                    running[self._submit(phase, part)] = _Task(part, time.monotonic())
                done, _ = self.ray.wait(list(running), num_returns=1, timeout=1.0)
                for reference in done:
                    task = running.pop(reference)
                    if not self._finished(reference):
                        self._count_stall(task.part)
                        waiting.append(task.part)
                self.job.journals.update()
                self._tell()
                for reference in self._stalled(phase, running):
                    task = running.pop(reference)
                    self._count_stall(task.part)
                    waiting.appendleft(task.part)
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)

    def _submit(self, phase: str, part: Part) -> Any:
        task = self.ray.remote(ray_tasks.do_part).options(
            num_cpus=self._cpus,
            num_gpus=self.options.gpus_per_worker,
            max_retries=_RETRIES,
            retry_exceptions=[OSError],
        )
        return task.remote(str(self.job.file.path), phase, part.index, part.count, self._device)

    def _finished(self, reference: Any) -> bool:
        """Whether a task came to its end; False where it was ended because it made no progress."""
        try:
            outcome = self.ray.get(reference)
        except (self.ray.exceptions.TaskCancelledError, self.ray.exceptions.WorkerCrashedError):
            return False
        except self.ray.exceptions.RayError as error:
            raise ClusterError(
                f"a worker failed {_RETRIES} times: {kbitq.errors.first_line(error)}",
                hint="the same command goes on from where it was; ray logs has more",
            ) from None
        if outcome:
            raise _raised(outcome)
        return True

    def _stalled(self, phase: str, running: dict[Any, _Task]) -> list[Any]:
        """The tasks whose attempts give no sign any more. They are ended, as far as their nodes answer."""
        latest: dict[str, Follower] = {}
        for attempt in self.job.journals.attempts.values():
            if attempt.part not in latest or attempt.grew > latest[attempt.part].grew:
                latest[attempt.part] = attempt
        found, now = [], time.monotonic()
        for reference, task in running.items():
            last = latest.get(ray_tasks.label(phase, task.part))
            if last is not None and now - max(last.grew, task.submitted) > self.options.stall:
                seconds = f"{self.options.stall:.0f} s"
                self._say(f"part {task.part} of the phase '{phase}' made no progress for {seconds}: it is begun again")
                self.ray.cancel(reference, force=True)  # which a process that hangs may not hear
                self._end_process(last)
                found.append(reference)
        return found

    def _end_process(self, attempt: Follower) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if any(node["NodeID"] == attempt.node for node in self.ray.nodes() if node["Alive"]):
            there = NodeAffinitySchedulingStrategy(attempt.node, soft=False)
            self.ray.remote(ray_tasks.end).options(num_cpus=0, scheduling_strategy=there).remote(attempt.pid)

    def _count_stall(self, part: Part) -> None:
        self._stalls[str(part)] += 1
        if self._stalls[str(part)] > _MOST_STALLS:
            raise ClusterError(
                f"part {part} of the phase '{self.job.phase}' was ended {_MOST_STALLS + 1} times",
                hint="the same command goes on from where it was; ray logs has more",
            )

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

    def _nodes_with_room(self) -> list[dict[str, Any]]:
        needs = self.options.gpus_per_worker
        return [
            node
            for node in self.ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= 1 and node["Resources"].get("GPU", 0) >= needs
        ]

    def _cpus_per_worker(self) -> int:
        if self.options.cpus_per_worker is not None:
            return self.options.cpus_per_worker
        gpus = self.options.gpus_per_worker

        def share(resources: dict[str, float]) -> float:
            return resources["CPU"] // (resources["GPU"] // gpus) if gpus else resources["CPU"]

        return max(1, int(min((share(node["Resources"]) for node in self._nodes), default=1)))

    def _room(self, node: dict[str, Any]) -> int:
        gpus, resources = self.options.gpus_per_worker, node["Resources"]
        by_cpus = int(resources["CPU"] // self._cpus)
        return min(by_cpus, int(resources["GPU"] // gpus)) if gpus else by_cpus


def _raised(outcome: dict[str, Any], lead: str = "") -> KbitqError:
    """The error that a node told of."""
    kind = getattr(kbitq.errors, outcome["error"], KbitqError)
    error: KbitqError = kind.__new__(kind)
    KbitqError.__init__(error, lead + outcome["message"], **outcome["given"])
    return error
