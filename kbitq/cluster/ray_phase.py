"""One phase of a plan as tasks of Ray: which of them are under way, which came to an end, which hang."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import kbitq.errors
from kbitq.cluster import ray_tasks
from kbitq.cluster.attempts import Follower
from kbitq.cluster.chunks import Part
from kbitq.cluster.job import Job
from kbitq.cluster.ray_nodes import RayOptions, Room, error_of
from kbitq.errors import ClusterError

_RETRIES = 10  # of a task whose node died or whose system failed
_MOST_STALLS = 3  # of one part


@dataclass
class _Task:
    """A task in flight."""

    part: Part
    submitted: float


class PhaseTasks:
    """Parts of the phase that a job is in, each a task, begun again as often as it needs.

    Args:
        ray: the module, connected.
        job: whose journals are read.
        options: of the run.
        room: what a worker takes.
        say: is told of tasks that are begun again.
    """

    def __init__(self, ray: Any, job: Job, options: RayOptions, room: Room, say: Callable[[str], None]) -> None:
        self.ray, self.job, self.options = ray, job, options
        self._say = say
        self._device = "cuda" if options.gpus_per_worker else "cpu"
        self._task = ray.remote(ray_tasks.do_part).options(
            num_cpus=room.cpus, num_gpus=options.gpus_per_worker, max_retries=_RETRIES, retry_exceptions=[OSError]
        )
        self._stalls: Counter[str] = Counter()

    def run(self, phase: str, parts: Iterable[Part], most: int, tell: Callable[[], None]) -> None:
        """Return when all parts are done. ``most`` are under way at once; ``tell`` is called when journals were read.

        Raises ClusterError where workers keep dying, or the error of the first part that has one.
        """
        waiting, running = deque(parts), dict[Any, _Task]()
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    part = waiting.popleft()
                    running[self._submit(phase, part)] = _Task(part, time.monotonic())
                done, _ = self.ray.wait(list(running), num_returns=1, timeout=1.0)
                for reference in done:
                    task = running.pop(reference)
                    if not self._finished(reference):
                        self._count_stall(phase, task.part)
                        waiting.append(task.part)
                self.job.journals.update()
                tell()
                for reference in self._stalled(phase, running):
                    waiting.appendleft(running.pop(reference).part)
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)

    def _submit(self, phase: str, part: Part) -> Any:
        return self._task.remote(str(self.job.file.path), phase, part.index, part.count, self._device)

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
            raise error_of(outcome)
        return True

    def _stalled(self, phase: str, running: dict[Any, _Task]) -> list[Any]:
        """The tasks that give no sign any more. They are ended, as far as their nodes answer.

        A task that has no journal yet may wait for a worker: it counts as one that hangs when nobody gives a sign.
        """
        known, found, now = defaultdict(list), [], time.monotonic()
        for attempt in self.job.journals.attempts.values():
            known[attempt.part].append(attempt)
        heard = max((attempt.grew for attempts in known.values() for attempt in attempts), default=0.0)
        for reference, task in running.items():
            attempts = known.get(ray_tasks.label(phase, task.part), [])
            mine = [attempt for attempt in attempts if attempt.began >= task.submitted]
            last = max(mine, key=lambda attempt: attempt.grew, default=None)
            if now - max(heard if last is None else last.grew, task.submitted) > self.options.stall:
                seconds = f"{self.options.stall:.0f} s"
                self._say(f"part {task.part} of the phase '{phase}' made no progress for {seconds}: it is begun again")
                self.ray.cancel(reference, force=True)  # which a process that hangs may not hear
                if last is not None:
                    self._end_process(last)
                    self._count_stall(phase, task.part)
                found.append(reference)
        return found

    def _end_process(self, attempt: Follower) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if any(node["NodeID"] == attempt.node for node in self.ray.nodes() if node["Alive"]):
            there = NodeAffinitySchedulingStrategy(attempt.node, soft=False)
            self.ray.remote(ray_tasks.end).options(num_cpus=0, scheduling_strategy=there).remote(attempt.pid)

    def _count_stall(self, phase: str, part: Part) -> None:
        self._stalls[str(part)] += 1
        if self._stalls[str(part)] > _MOST_STALLS:
            raise ClusterError(
                f"part {part} of the phase '{phase}' was ended {_MOST_STALLS + 1} times",
                hint="the same command goes on from where it was; ray logs has more",
            )
