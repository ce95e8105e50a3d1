"""What a launcher does before work begins, and the script for Slurm; no cluster is needed."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.program import Kbitq
from kbitq.cluster.attempts import Follower
from kbitq.cluster.chunks import Part
from kbitq.cluster.ray_nodes import RayOptions, check_answer, error_of, room_of
from kbitq.cluster.ray_phase import PhaseTasks, _Task
from kbitq.cluster.ray_tasks import do_part, look
from kbitq.errors import ClusterError, NonFiniteError, SourceChangedError


@pytest.fixture
def plan(tiny: Path, tmp_path: Path, kbitq: Kbitq) -> Path:
    path = tmp_path / "plan.json"
    assert kbitq("plan", tiny, "--k", 3, "-o", tmp_path / "out.safetensors", "--save", path).code == 0
    return path


def check(plan: Path, answer: dict[str, Any], line: str) -> None:
    job: Any = SimpleNamespace(file=SimpleNamespace(journals=plan.parent, out=plan.parent / "out"))
    check_answer(job, "10.0.0.2", answer, line)


def test_a_node_that_sees_the_disk(plan: Path) -> None:
    (plan.parent / "probe").write_text("a line")
    answer = look(str(plan), str(plan.parent / "probe"), "cpu")
    check(plan, answer, "a line")
    with pytest.raises(ClusterError, match=r"node 10\.0\.0\.2 does not share the disk of"):
        check(plan, answer, "another line")  # a folder of that name that is not the same one


def test_a_node_whose_disk_is_not_the_shared_one(plan: Path, tmp_path: Path) -> None:
    answer = look(str(plan), str(tmp_path / "elsewhere" / "probe"), "cpu")
    with pytest.raises(ClusterError, match=r"does not share the disk of .*\(No such file or directory\)"):
        check(plan, answer, "a line")
    (tmp_path / "probe").write_text("a line")
    answer = look(str(plan), str(tmp_path / "probe"), "cpu")
    (tmp_path / answer["made"]).unlink()  # what the node writes does not arrive here
    with pytest.raises(ClusterError, match="does not share the disk of"):
        check(plan, answer, "a line")


def test_errors_of_a_node_come_back_as_they_were(plan: Path, tiny: Path) -> None:
    assert do_part(str(plan), "scan", 0, 1, "cpu") == {}
    data = bytearray(tiny.read_bytes())
    data[-1] ^= 1
    tiny.write_bytes(data)
    (plan.parent / "probe").write_text("a line")
    from kbitq.cluster import ray_tasks

    ray_tasks._JOBS.clear()
    answer = look(str(plan), str(plan.parent / "probe"), "cpu")
    with pytest.raises(SourceChangedError, match=r"node 10\.0\.0\.2: .* is not the file that") as found:
        check(plan, answer, "a line")
    assert found.value.remedy == "plan-again"
    other = error_of({"error": "NonFiniteError", "message": "m", "given": {"hint": "h", "data": {}}})
    assert isinstance(other, NonFiniteError) and other.hint == "h"


def test_a_plan_saved_anew_is_another_job(tiny: Path, tmp_path: Path, kbitq: Kbitq, plan: Path) -> None:
    """A worker's process outlives a run; the next one, to the same output, begins without journals."""
    out = tmp_path / "out.safetensors"
    for _ in range(2):
        assert do_part(str(plan), "scan", 0, 1, "cpu") == do_part(str(plan), "write", 0, 1, "cpu") == {}
        assert kbitq("finish", plan, "-q").code == 0
        made = out.read_bytes()
        out.unlink()
        assert kbitq("plan", tiny, "--k", 3, "-o", out, "--save", plan, "--force").code == 0
    assert made


def ray_of(*resources: dict[str, float]) -> Any:
    return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": node} for node in resources])


def test_room_for_workers() -> None:
    head, plain, gpus = {"memory": 1e9}, {"CPU": 8.0}, {"CPU": 9.0, "GPU": 4.0}
    of_cpus = room_of(ray_of(head, plain, gpus), RayOptions())
    assert (len(of_cpus.nodes), of_cpus.cpus, of_cpus.slots) == (2, 8, 2)
    of_gpus = room_of(ray_of(head, plain, gpus), RayOptions(gpus_per_worker=1))
    assert (of_gpus.nodes[0]["Resources"], of_gpus.cpus, of_gpus.slots) == (gpus, 2, 4)
    assert room_of(ray_of(gpus), RayOptions(gpus_per_worker=2, cpus_per_worker=1, workers=1)).slots == 1
    with pytest.raises(ClusterError, match="room for a worker of 1 cores and 1 GPUs: the largest has 8"):
        room_of(ray_of(head, plain), RayOptions(gpus_per_worker=1))
    with pytest.raises(ClusterError, match="worker of 16 cores and 0 GPUs: the largest has 9 cores"):
        room_of(ray_of(plain, gpus), RayOptions(cpus_per_worker=16))
    with pytest.raises(ClusterError, match="the largest has 0 cores"):
        room_of(ray_of(head), RayOptions())


def test_what_ray_gives_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads as it has cores, whatever the process began with; GPUs that are not its first ones end it."""
    from kbitq.cluster import ray_tasks

    before, ended = torch.get_num_threads(), list[int]()
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr(ray_tasks, "_GPUS", [])
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        ray_tasks._take_devices("cpu")
        assert torch.get_num_threads() == 3
        for visible in ("1", "1", "0"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            assert ended == []
            ray_tasks._take_devices("cuda")
        assert ended == [0]
    finally:
        torch.set_num_threads(before)


class Quiet:
    """A launcher whose cluster has a task for each of two parts; of one there is a journal of an earlier run."""

    def __init__(self) -> None:
        now = time.monotonic()
        old = Follower(Path("old"), part="write 1/2", began=now - 9, grew=now - 9, node="n", pid=7)
        self.ray = SimpleNamespace(cancel=lambda *_, **__: None, nodes=lambda: [{"NodeID": "n", "Alive": True}])
        self.said, self.ended, self.counted = list[str](), list[int](), list[Part]()
        self.job = SimpleNamespace(journals=SimpleNamespace(attempts={"old": old}))
        self.options, self._say = RayOptions(stall=1), self.said.append
        self._end_process = lambda attempt: self.ended.append(attempt.pid)
        self._count_stall = lambda _, part: self.counted.append(part)

    def stalled(self, *ages: float) -> list[int]:
        now = time.monotonic()
        tasks: Any = {i: _Task(Part(i, 2), now - age) for i, age in enumerate(ages)}
        return PhaseTasks._stalled(self, "write", tasks)  # type: ignore[arg-type]


def test_tasks_that_wait_and_tasks_that_hang() -> None:
    """A task that has no journal waits as long as others work; its part's journal of an earlier run is not its own."""
    quiet, now = Quiet(), time.monotonic()
    assert quiet.stalled(0.5, 0.5) == []
    quiet.job.journals.attempts["busy"] = Follower(
        Path("b"), part="write 0/2", began=now - 4, grew=now, node="n", pid=8
    )
    assert quiet.stalled(5, 5) == []
    quiet.job.journals.attempts["busy"].grew = now - 3
    assert quiet.stalled(5, 5) == [0, 1]
    assert (quiet.ended, quiet.counted) == ([8], [Part(0, 2)])  # the worker of the earlier run may be at other work now


def test_ray_that_is_not_installed(tiny: Path, tmp_path: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    ended = kbitq("quantize", tiny, "--k", 3, "-o", tmp_path / "out.safetensors", "--cluster", "auto")
    assert ended.code == 1 and "hint: pip install 'kbitq[ray]'" in ended.err


def test_the_script_for_slurm(tiny: Path, tmp_path: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with an ``sbatch`` that does each task of the array at once, one after the other."""
    odd = tmp_path / 'it\'s "odd" $HOME `x`'
    odd.mkdir()
    out = odd / "out.safetensors"
    made = kbitq("quantize", tiny, "--k", 3, "-o", out, "--cluster", "slurm", "--workers", 2, "--gpus-per-worker", 1)
    assert made.code == 0 and "--array=0-1 --requeue" in made.out and "--gpus-per-task=1" in made.out
    assert subprocess.run(["sh", "-n"], input=made.out, text=True).returncode == 0
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "sbatch"
    fake.write_text(
        '#!/bin/sh\ncat > "$0.$$"\ncase "$*" in *--array*) tasks="0 1";; *) tasks=0;; esac\n'
        "for i in $tasks; do SLURM_ARRAY_TASK_ID=$i SLURM_ARRAY_TASK_COUNT=2 SLURM_ARRAY_TASK_MIN=0 "
        'sh "$0.$$" --patience 0 >&2 || exit 1; done\necho 123\n'
    )
    fake.chmod(0o755)
    script = made.out.replace(" --device cuda", " --patience 0")
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    ended = subprocess.run(["sh"], input=script, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    single = tmp_path / "single.safetensors"
    assert kbitq("quantize", tiny, "--k", 3, "-o", single, "--quiet").code == 0
    assert out.read_bytes() == single.read_bytes()


def test_a_path_that_no_script_can_name(tiny: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    ended = kbitq("quantize", tiny, "--k", 3, "-o", tmp_path / "a\nPART\nb.safetensors", "--cluster", "slurm")
    assert (ended.code, ended.out) == (1, "") and "has a line break" in ended.err


def test_slurm_has_no_output_to_publish(tiny: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    ended = kbitq("quantize", tiny, "--k", 3, "--cluster", "slurm", "--write-recipe", tmp_path / "r.toml")
    assert ended.code == 2 and "which Slurm makes later" in ended.err
