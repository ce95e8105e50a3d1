"""How tests run the program, and what they run it on."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers import fresh

PROGRAM = (sys.executable, "-m", "kbitq.cli.main")


class Result(NamedTuple):
    """What a run of the program came to."""

    code: int
    out: str
    err: str


Kbitq = Callable[..., Result]


def spawn(*arguments: object, **options: Any) -> Result:
    """The same in a process of its own."""
    return Result(*fresh.run(*PROGRAM[1:], *arguments, **options))


def in_this_process(capsys: pytest.CaptureFixture[str]) -> Kbitq:
    """The program without a process of its own."""
    from kbitq.cli.main import run

    def call(*arguments: object) -> Result:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Two layers with a matrix to quantize each, and one of everything that is kept."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, dtype=np.float32) * 0.02

    tensors = {"model.embed_tokens.weight": normal(300, 64), "lm_head.weight": normal(300, 64)}
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = normal(128, 64)
        tensors[f"model.layers.{layer}.mlp.up_proj.bias"] = normal(128)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = normal(64)
    tensors["model.positions"] = np.arange(8, dtype=np.int64)
    tensors["model.nothing"] = np.zeros((0, 64), dtype=np.float32)
    return tensors


def save_tiny(folder: Path) -> Path:
    """A one-file checkpoint of ``tiny_tensors``."""
    path = folder / "tiny.safetensors"
    save_file(tiny_tensors(), path)
    return path
