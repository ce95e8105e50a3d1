"""The program in this process, and small checkpoints to run it on."""

from pathlib import Path

import pytest

from helpers.checkpoints import model_tensors, write_folder
from helpers.program import Kbitq, in_this_process, save_tiny


@pytest.fixture
def kbitq(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kbitq:
    """``kbitq("work", plan, "--part", "0/2")`` in this process, without what a launcher of its own has set."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return in_this_process(capsys)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A one-file checkpoint of ``tiny_tensors``."""
    return save_tiny(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of ``model_tensors`` in two files."""
    return write_folder(tmp_path / "tiny", model_tensors(), shards=2)
