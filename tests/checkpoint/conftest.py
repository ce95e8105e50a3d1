"""Small checkpoints to work on, and ways to run the library on them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.checkpoints import model_tensors, write_folder
from kbitq.checkpoint import QuantizeOptions, RunReport, plan_quantize, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two shards with index, config, tokenizer and a sub-folder."""
    return write_folder(tmp_path / "tiny", model_tensors(), shards=2)


@pytest.fixture
def quantize() -> Callable[..., RunReport]:
    """``quantize(source, out, k=3, **options)``."""

    def call(source: Path, out: Path | None = None, k: int = 3, **options: object) -> RunReport:
        return run(plan_quantize(source, out, QuantizeOptions(k=k, **options)))  # type: ignore[arg-type]

    return call
