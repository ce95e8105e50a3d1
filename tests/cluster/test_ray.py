"""A Ray cluster of three nodes on this machine: a worker that hangs, a driver and two nodes that die without grace."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import bytes_of
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.checkpoint.passes.journal_lines import parsed_line
from kbitq.cluster import Part, finish, ray_tasks, save_plan, work
from kbitq.cluster.job import Job
from kbitq.cluster.ray_launcher import _Launcher, quantize_on_ray
from kbitq.cluster.ray_nodes import RayOptions, room_of
from kbitq.errors import BuildError, ClusterError

ray = pytest.importorskip("ray", reason="Ray is not installed (make test-ray)")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LAYERS, ROWS, COLS = 8, 4096, 2048  # 16 MiB each: 4 chunks
OPTIONS = QuantizeOptions(k=5, device="cpu")  # the search of which takes some seconds in all


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "source"
    folder.mkdir()
    torch.manual_seed(0)
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(LAYERS)]
    save_file({n: torch.randn(ROWS, COLS, dtype=torch.bfloat16) for n in names}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def wanted(source: Path) -> dict[str, bytes]:
    return bytes_of(run(plan_quantize(source, source.parent / "single" / "out", OPTIONS)).out)


class Nodes:
    """A cluster whose nodes can be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        config = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_timeout_ms": 1000}
        head = {"num_cpus": 0, "object_store_memory": 80 << 20, "_system_config": config, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(3)]
        self.cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def kill(self) -> None:
        """End one node at once, with all that runs on it."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


def journals(out: Path) -> list[list[dict[str, Any]]]:
    """The records of each attempt."""
    folder = out.parent / f".{out.name}.kbitq-partial" / "parts"
    files = [path.read_bytes().splitlines(keepends=True) for path in folder.glob("*.jsonl")]
    return [[record for line in lines if (record := parsed_line(line))] for lines in files]


def done(out: Path, phase: str) -> int:
    """Chunks of a phase that the journals know."""
    return sum(record["is"] == phase for records in journals(out) for record in records)


def wait_for(condition: Callable[[], object], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


class Driver:
    """``kbitq quantize --cluster`` as a process of its own."""

    def __init__(self, source: Path, out: Path, address: str, *more: str) -> None:
        program = [sys.executable, "-m", "kbitq.cli.main", "quantize", str(source), "--k", "5", "-o", str(out)]
        self.process = subprocess.Popen(
            [*program, "--device", "cpu", "--cluster", address, *more],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def end(self, seconds: float = 150) -> str:
        """Its output; it must have ended well."""
        said, _ = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, said
        return said


def stop_a_writer(out: Path) -> bool:
    """Stop a worker as if it hung, one that is at work on a part of the phase ``write``. Whether there was one."""
    for records in sorted(journals(out), key=len):
        head = records[0] if records else {"part": ""}
        if head["part"].startswith("write") and not any(record["is"] == "write" for record in records):
            try:
                os.kill(head["pid"], signal.SIGSTOP)
            except ProcessLookupError:
                continue
            return True
    return False


def test_workers_have_the_cores_and_gpus_that_ray_gives_them(
    nodes: Nodes, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node that says it has two GPUs: what the tasks find there is written down instead of being computed on."""

    def note(path: str, phase: str, index: int, count: int, device: str) -> dict[str, Any]:
        ray_tasks._take_devices(device)
        time.sleep(0.2)
        found = os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], torch.get_num_threads(), device
        (Path(path).parent / f"{phase}-{index}").write_text(" ".join(map(str, found)))
        return {}

    plan = plan_quantize(source, tmp_path / "out", OPTIONS)
    options = RayOptions(address=nodes.address, gpus_per_worker=1)
    with pytest.raises(ClusterError, match=r"room for a worker of 1 cores and 1 GPUs: .* at most 0 GPUs are in one"):
        quantize_on_ray(plan, options)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # of the tests; a user's own would count
    node = nodes.cluster.add_node(num_cpus=4, num_gpus=2, object_store_memory=80 << 20)
    ray.init(address=nodes.address, log_to_driver=False)
    try:
        nodes.cluster.wait_for_nodes()
        if not torch.cuda.is_available():
            with pytest.raises(BuildError, match=r"^\S+: device cuda cannot be used: "):
                quantize_on_ray(plan, options)
        monkeypatch.setattr(ray_tasks, "do_part", note)
        room = room_of(ray, options)
        launcher = _Launcher(ray, Job(save_plan(plan).path), options, room, None, print)
        launcher._run_phase("scan", launcher.job.chunks)
    finally:
        ray.shutdown()
        nodes.cluster.remove_node(node)
    assert (room.cpus, room.slots) == (2, 2)
    found = [path.read_text().split() for path in (tmp_path / ".out.kbitq-partial").glob("scan-*")]
    assert len(found) == min(40, len(launcher.job.chunks))
    assert {tuple(what[2:]) for what in found} == {("2", "cuda")}
    assert {what[1] for what in found} == {"0", "1"}
    assert len({what[0] for what in found}) == len({tuple(what[:2]) for what in found})  # a process has one GPU


def test_a_worker_that_hangs_is_ended(nodes: Nodes, source: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    driver = Driver(source, out, nodes.address, "--stall", "6")
    wait_for(lambda: stop_a_writer(out))
    said = driver.end()
    assert "made no progress for 6 s: it is begun again" in said
    assert bytes_of(out) == wanted


def test_the_driver_dies_and_others_go_on_without_the_cluster(
    nodes: Nodes, source: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    driver = Driver(source, out, nodes.address)
    wait_for(lambda: done(out, "write") >= 3)
    driver.process.kill()
    driver.process.wait()
    plan = tmp_path / ".out.kbitq-partial" / "plan.json"
    reports: list[Any] = []
    hands = [Thread(target=lambda i=i: reports.append(work(plan, Part(i, 3), patience=20))) for i in range(3)]
    for hand in hands:
        hand.start()
    for hand in hands:
        hand.join()
    assert len(reports) == 3 and sum(r.reused for r in reports) >= 3
    finish(plan)
    assert bytes_of(out) == wanted


def test_two_of_three_nodes_die(nodes: Nodes, source: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    driver = Driver(source, out, nodes.address)
    wait_for(lambda: done(out, "scan") >= 2)
    nodes.kill()
    wait_for(lambda: done(out, "write") >= 4)
    nodes.kill()
    assert "3 nodes, 3 workers of 1 cores at once" in driver.end()
    assert bytes_of(out) == wanted
