"""The program in this process, and a small checkpoint to run it on."""

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from helpers.program import Kbitq, Result, tiny_tensors
from kbitq.cli.main import run


@pytest.fixture
def kbitq(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kbitq:
    """``kbitq("work", plan, "--part", "0/2")`` in this process, without what a launcher of its own has set."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"):
        monkeypatch.delenv(name, raising=False)

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
