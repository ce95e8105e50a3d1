"""The nodes of a Ray cluster: room for workers, and whether all of them see one disk and come to one plan."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kbitq.errors
from kbitq.checkpoint.output.file_writer import writing
from kbitq.cluster import ray_tasks
from kbitq.cluster.job import Job
from kbitq.errors import ClusterError, KbitqError

STALL_SECONDS = 600.0
_ANSWER_SECONDS = 180.0

Node = dict[str, Any]


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


@dataclass(frozen=True)
class Room:
    """Where workers have room.

    Attributes:
        nodes: as Ray describes them.
        cpus: cores of a worker.
        slots: how many workers there may be at once.
    """

    nodes: Sequence[Node]
    cpus: int
    slots: int


def room_of(ray: Any, options: RayOptions) -> Room:
    """The room of the cluster that this process is connected to. Raises ClusterError where there is none."""
    gpus = options.gpus_per_worker
    having = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    nodes = [node for node in having if node["Resources"].get("GPU", 0) >= gpus]
    cpus = options.cpus_per_worker or max(1, int(min((_share(n["Resources"], gpus) for n in nodes), default=1)))
    slots = sum(_slots(node["Resources"], cpus, gpus) for node in nodes)
    if not slots:
        most = [int(max((n["Resources"].get(name, 0) for n in having), default=0)) for name in ("CPU", "GPU")]
        raise ClusterError(
            f"no node of the Ray cluster has room for a worker of {cpus} cores and {gpus} GPUs: "
            f"the largest has {most[0]} cores, and at most {most[1]} GPUs are in one",
            hint="ray status shows what the nodes have",
        )
    return Room(nodes, cpus, slots if options.workers is None else min(slots, options.workers))


def _share(resources: dict[str, float], gpus: int) -> float:
    return resources["CPU"] // (resources["GPU"] // gpus) if gpus else resources["CPU"]


def _slots(resources: dict[str, float], cpus: int, gpus: int) -> int:
    by_cpus = int(resources["CPU"] // cpus)
    return min(by_cpus, int(resources["GPU"] // gpus)) if gpus else by_cpus


def check_nodes(ray: Any, job: Job, nodes: Sequence[Node]) -> None:
    """Before any work: does every node see the disk that this one sees, and come to the same plan?

    Raises ClusterError, or what a node has to say against the plan.
    """
    probe = job.file.journals / f"probe-{secrets.token_hex(8)}"
    line = secrets.token_hex(16)
    with writing(probe):
        probe.write_text(line)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(ray_tasks.look)
    try:
        asked = {
            node["NodeManagerAddress"] + " " + node["NodeID"][:8]: look.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(str(job.file.path), str(probe), "cpu")
            for node in nodes
        }
        for name, answer in asked.items():
            check_answer(job, name, _answer(ray, name, answer), line)
    finally:
        for left in probe.parent.glob(f"{probe.name}*"):  # and no other command's
            left.unlink(missing_ok=True)


def _answer(ray: Any, name: str, answer: Any) -> Any:
    try:
        return ray.get(answer, timeout=_ANSWER_SECONDS)
    except Exception as error:  # whatever Ray or the node's Python has to say
        raise ClusterError(
            f"node {name} cannot run kbitq: {kbitq.errors.first_line(error)}",
            hint="install the same kbitq, Python and Ray on every node",
        ) from None


def check_answer(job: Job, name: str, answer: dict[str, Any], line: str) -> None:
    """Raise what is wrong with what node ``name`` answered, where the probe has ``line``."""
    if "error" in answer:
        raise error_of(answer, f"node {name}: ")
    beside = job.file.journals / (answer["made"] or "probe-")
    try:
        shared = answer["seen"] == line and beside.read_text() == line
    except OSError:
        shared = False
    if not shared:
        raise ClusterError(
            f"node {name} does not share the disk of {job.file.out}"
            + (f" ({answer['why']})" if answer.get("why") else ""),
            hint="put the output on a disk that all nodes see under one path",
        )


def error_of(outcome: dict[str, Any], lead: str = "") -> KbitqError:
    """The error that a node told of."""
    kind = getattr(kbitq.errors, outcome["error"], KbitqError)
    error: KbitqError = kind.__new__(kind)
    KbitqError.__init__(error, lead + outcome["message"], **outcome["given"])
    return error
