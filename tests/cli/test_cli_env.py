"""``kbitq env``, also where something is missing."""

import json
import os
from importlib import metadata
from pathlib import Path

import pytest

import kbitq as library
from helpers import fresh
from helpers.program import Kbitq, Result
from kbitq import _C
from kbitq.cli.commands import env
from kbitq.cli.views import environment

WITHOUT_CORE = "import sys; sys.modules['kbitq._C'] = None; from kbitq.cli.main import run; sys.exit(run())"


def run_without_core(*arguments: object) -> Result:
    return Result(*fresh.run("-c", WITHOUT_CORE, *arguments))


def test_it_tells_what_is_there(kbitq: Kbitq) -> None:
    code, out, err = kbitq("env")
    assert (code, err) == (0, "")
    said = {line[:16].rstrip(): line[16:] for line in out.splitlines()}
    assert said["kbitq"] == library.__version__
    assert said["torch"] == metadata.version("torch")
    assert said["SIMD level"].startswith(_C.simd())
    assert set(env._PACKAGES) <= set(said)
    assert {"transformers", "peft"} <= set(said)


@pytest.mark.parametrize(
    ("cuda", "status", "line"),
    [
        (True, "", "yes"),
        (
            True,
            "CUDA driver version is insufficient",
            "built in, but cannot be used: CUDA driver version is insufficient",
        ),
        (False, "built with KBITQ_CUDA=OFF", "no: built with KBITQ_CUDA=OFF"),
    ],
)
def test_what_it_says_of_cuda(cuda: bool, status: str, line: str) -> None:
    facts = env.gather()
    facts["core"] = {**facts["core"], "cuda": cuda, "cuda_status": status}
    assert f"CUDA in kbitq   {line}" in environment.lines(facts)


def test_json(kbitq: Kbitq) -> None:
    facts = json.loads(kbitq("env", "--json").out)
    assert facts["core"]["loaded"] is True
    assert facts["core"]["simd_available"] == list(_C.simd_levels())
    assert facts["core"]["cuda"] is _C.has_cuda
    assert set(facts["packages"]) >= {"torch", "safetensors", "numpy"}


@pytest.mark.slow
def test_without_the_core_it_still_answers(tiny: Path) -> None:
    code, out, err = run_without_core("env")
    assert (code, err) == (0, "")
    assert "missing: " in out
    assert "pip install" in out
    code, out, err = run_without_core("quantize", tiny, "--k", 3)
    assert (code, out) == (1, "")
    assert err.startswith("error: kbitq's compiled core")
    assert "pip install" in err
    assert len(err.splitlines()) == 2


def test_gpus_as_the_driver_reports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kbitq: Kbitq) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '570.1, NVIDIA H200, 143771 MiB, 9.0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert env.gather()["nvidia"] == {
        "driver": "570.1",
        "gpus": [{"name": "NVIDIA H200", "memory": "143771 MiB", "compute_capability": "9.0"}],
        "reason": None,
    }
    assert "NVIDIA H200, 143771 MiB, sm_90" in kbitq("env").out
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert "nvidia-smi failed" in env.gather()["nvidia"]["reason"]
    tool.write_text("#!/bin/sh\ntrue\n")
    assert env.gather()["nvidia"]["reason"] == "no GPU found"


@pytest.mark.parametrize("command", [("env",), ("quantize", "{tiny}", "--k", "3")])
def test_an_instruction_set_that_is_not_there(command: tuple[str, ...], tiny: Path) -> None:
    words = [word.format(tiny=tiny) for word in command]
    program = "import sys; from kbitq.cli.main import run; sys.exit(run())"
    done = fresh.run("-c", program, *words, env=os.environ | {"KBITQ_SIMD": "sse9"})
    said = done.stdout + done.stderr
    assert "KBITQ_SIMD = 'sse9'" in said and "scalar" in said
    assert "internal error" not in said
