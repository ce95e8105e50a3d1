"""The program in this process, and small checkpoints to run it on."""

from pathlib import Path

import pytest

from helpers.program import Kbitq, in_this_process, save_tiny


@pytest.fixture
def kbitq(capsys: pytest.CaptureFixture[str]) -> Kbitq:
    """``kbitq("quantize", path, "--k", 3)`` in this process."""
    return in_this_process(capsys)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A one-file checkpoint of ``tiny_tensors``."""
    return save_tiny(tmp_path)


@pytest.fixture
def tiny_k3(tiny: Path, kbitq: Kbitq) -> Path:
    """``tiny`` quantized to K=3."""
    out = tiny.with_name("tiny-kbitq-k3.safetensors")
    assert kbitq("quantize", tiny, "--k", 3, "--quiet") == (0, f"{out}\n", "")
    return out
