"""The program in this process, and small checkpoints to run it on."""

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from helpers.program import Kbitq, Result, tiny_tensors
from kbitq.cli.main import run


@pytest.fixture
def kbitq(capsys: pytest.CaptureFixture[str]) -> Kbitq:
    """``kbitq("quantize", path, "--k", 3)`` in this process."""

    def call(*arguments: object) -> Result:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A one-file checkpoint of ``tiny_tensors``."""
    path = tmp_path / "tiny.safetensors"
    save_file(tiny_tensors(), path)
    return path


@pytest.fixture
def tiny_k3(tiny: Path, kbitq: Kbitq) -> Path:
    """``tiny`` quantized to K=3."""
    out = tiny.with_name("tiny-kbitq-k3.safetensors")
    assert kbitq("quantize", tiny, "--k", 3, "--quiet") == (0, f"{out}\n", "")
    return out
