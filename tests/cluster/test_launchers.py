"""What a launcher does before work begins, and the script for Slurm; no cluster is needed."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.program import Kbitq
from kbitq.cluster.ray_launcher import _Launcher, _raised
from kbitq.cluster.ray_tasks import do_part, look
from kbitq.errors import ClusterError, NonFiniteError, SourceChangedError


@pytest.fixture
def plan(tiny: Path, tmp_path: Path, kbitq: Kbitq) -> Path:
    path = tmp_path / "plan.json"
    assert kbitq("plan", tiny, "--k", 3, "-o", tmp_path / "out.safetensors", "--save", path).code == 0
    return path


def check(plan: Path, answer: dict[str, Any], line: str) -> None:
    file = SimpleNamespace(journals=plan.parent, out=plan.parent / "out")
    _Launcher._check_answer(SimpleNamespace(job=SimpleNamespace(file=file)), "10.0.0.2", answer, line)  # type: ignore[arg-type]


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
    other = _raised({"error": "NonFiniteError", "message": "m", "given": {"hint": "h", "data": {}}})
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


def test_ray_that_is_not_installed(tiny: Path, tmp_path: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    ended = kbitq("quantize", tiny, "--k", 3, "-o", tmp_path / "out.safetensors", "--cluster", "auto")
    assert ended.code == 1 and "hint: pip install 'kbitq[ray]'" in ended.err


def test_the_script_for_slurm(tiny: Path, tmp_path: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with an ``sbatch`` that does each task of the array at once, one after the other."""
    out = tmp_path / "out.safetensors"
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


def test_slurm_has_no_output_to_publish(tiny: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    ended = kbitq("quantize", tiny, "--k", 3, "--cluster", "slurm", "--write-recipe", tmp_path / "r.toml")
    assert ended.code == 2 and "which Slurm makes later" in ended.err
