"""``kbitq push --auto-map``: a Python file through which ``trust_remote_code`` finds kbitq, or says what to install."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from helpers import fresh
from helpers.fake_hub import FakeHub
from helpers.small_models import make_model
from kbitq.cli.main import run
from kbitq.errors import CheckpointError

pytest.importorskip("transformers", reason="transformers is not installed")

from kbitq.integrations.transformers.remote_code import FILE, remote_code

LOAD = """
import sys
{before}
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{folder}"{how})
print(type(model).__name__, type(model.model.layers[0].mlp.up_proj).__name__, "kbitq.nn.linear" in sys.modules)
with torch.no_grad():
    print(model(input_ids=torch.arange(9)[None] * 31 % 320).logits.float().sum().item())
"""
TRUST = ", trust_remote_code=True"


def load(folder: Path, before: str = "", how: str = "") -> fresh.Finished:
    code = LOAD.format(before=before, folder=folder, how=how)
    return fresh.run("-c", code, env={**os.environ, "HF_HOME": str(folder.parent / "hf"), "HF_HUB_OFFLINE": "1"})


def loaded(folder: Path) -> str:
    """What the program says in this process, in which kbitq has been imported."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(LOAD.format(before="", folder=folder, how=""), {})
    return said.getvalue()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "plain")
    assert run(["quantize", str(tmp_path / "plain"), "--k", "3", "-o", str(tmp_path / "k3"), "--quiet"]) == 0
    return tmp_path / "k3"


@pytest.mark.slow
def test_a_published_model(packed: Path, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["push", str(packed), "me/k3", "--auto-map", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert f"changed or added beside it: SHA256SUMS, config.json, {FILE}" in shown.err
    assert f"through `{FILE}`" in shown.out
    assert run(["push", str(packed), "me/k3", "--auto-map", "--quiet"]) == 0
    assert not (packed / FILE).exists()
    files = hub.repos["me/k3"].files
    assert files["README.md"].decode() == shown.out
    there = tmp_path / "downloaded"
    there.mkdir()
    for name, data in files.items():
        (there / name).write_bytes(data)
    assert run(["verify", str(there)]) == 0, capsys.readouterr().out

    here, trusted = loaded(packed), load(there, how=TRUST)
    assert trusted.stdout == here, trusted.stderr
    assert here.startswith("LlamaForCausalLM KbitLinear True\n")
    assert loaded(there) == here  # kbitq alone needs no trust

    without = load(there, before="sys.modules['kbitq'] = None", how=TRUST)
    assert without.returncode == 1
    assert "quantized by kbitq: pip install kbitq" in without.stderr
    assert "kbitq" in load(there).stderr  # the guard


def test_the_text_is_a_program() -> None:
    text, config = remote_code({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM")
    compile(text, FILE, "exec")
    assert config["auto_map"] == {
        "AutoConfig": "kbitq_auto.LlamaConfig", "AutoModelForCausalLM": "kbitq_auto.LlamaForCausalLM",
    }  # fmt: skip
    assert remote_code(config, "AutoModelForCausalLM") == (text, config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "llama"},
        {"model_type": ["llama"], "architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["Llama; import os"]},
        {"model_type": "llama", "architectures": ["AutoTokenizer"]},
        {"model_type": "own", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "own.Own"}},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "auto_map": "own"},
    ],
    ids=json.dumps,
)
def test_models_that_take_none(config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        remote_code(config, "AutoModelForCausalLM")


def test_a_file_takes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.numpy import save_file

    from helpers.program import tiny_tensors

    save_file(tiny_tensors(), tmp_path / "a.safetensors")
    assert (
        run(["quantize", str(tmp_path / "a.safetensors"), "--k", "3", "-o", str(tmp_path / "b.safetensors"), "--quiet"])
        == 0
    )
    capsys.readouterr()
    assert run(["push", str(tmp_path / "b.safetensors"), "me/b", "--auto-map", "--dry-run"]) == 1
    assert ": only the folder of a model takes --auto-map\n" in capsys.readouterr().err
