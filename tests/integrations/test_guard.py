"""The guard of a folder: loaders that do not know kbitq stop, and what is loaded or made of it has none."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import kbitq
from helpers.small_models import auto_class, outputs
from helpers.small_models import load_complete as load
from helpers.tolerances import relative_error
from kbitq.format import GUARD_SENTENCE

OTHERS = [path for path in os.environ.get("KBITQ_TEST_PYTHONS", "").split(os.pathsep) if path]


@pytest.mark.parametrize("python", [sys.executable, *OTHERS])
def test_without_kbitq_no_option_loads_a_folder(python, folders, tmp_path) -> None:
    saved = load("llama", folders("llama", 3)[1])
    saved.save_pretrained(tmp_path / "a")
    kbitq.save_pretrained(saved, tmp_path / "b", max_shard_size=40_000)
    models = [str(folders(kind, 3)[1]) for kind in ("llama", "moe", "gpt2")] + [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]
    bare = tmp_path / "bare"  # as written before the config had a guard
    bare.mkdir()
    (bare / "model.safetensors").symlink_to(folders("llama", 3)[1] / "model.safetensors")
    config = json.loads((folders("llama", 3)[1] / "config.json").read_text())
    assert config.pop("transformers_weights") == GUARD_SENTENCE
    (bare / "config.json").write_text(json.dumps(config))
    code = f"""
        import transformers
        for options in ({{}}, {{"ignore_mismatched_sizes": True}}):
            for folder in {models!r}:
                try:
                    transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
                    raise SystemExit(f"{{folder}} was loaded with {{options}}")
                except ValueError as error:
                    assert {GUARD_SENTENCE!r} in str(error), error
        try:
            transformers.AutoModelForCausalLM.from_pretrained({str(bare)!r})
            raise SystemExit("the tensor did not stop it")
        except RuntimeError as error:
            assert "mismatch" in str(error), error
    """
    done = subprocess.run([python, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert relative_error(outputs(load("llama", bare), "llama"), outputs(saved, "llama")) == 0


def test_the_guard_is_gone_from_what_is_loaded(folders, tmp_path) -> None:
    source, folder = folders("llama", 3)
    for options in ({}, {"quantization_config": kbitq.KbitqConfig(dequantize=True)}):
        model = load("llama", folder, **options)
        assert not hasattr(model.config, "transformers_weights")
    model.save_pretrained(tmp_path / "dense")
    assert "transformers_weights" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert auto_class("llama").from_pretrained(tmp_path / "dense").num_parameters() == model.num_parameters()
    assert auto_class("llama").from_pretrained(source).num_parameters() == model.num_parameters()


def test_a_weight_file_of_another_name(folders, tmp_path) -> None:
    """The source's config names it; so does, in its place, that of what is made of it."""
    from kbitq.checkpoint import QuantizeOptions, dequantize_checkpoint, plan_quantize, run

    source = tmp_path / "source"
    source.mkdir()
    plain, _ = folders("llama", 3)
    shutil.copy(plain / "model.safetensors", source / "other.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"transformers_weights": "other.safetensors"}
    (source / "config.json").write_text(json.dumps(config))
    run(plan_quantize(source, tmp_path / "packed", QuantizeOptions(k=3)))
    packed = load("llama", tmp_path / "packed")
    kbitq.save_pretrained(packed, tmp_path / "again")
    for folder in (tmp_path / "packed", tmp_path / "again"):
        told = json.loads((folder / "config.json").read_text())
        assert told["transformers_weights"] == GUARD_SENTENCE
        assert told["quantization_config"]["transformers_weights"] == "other.safetensors"
        assert (folder / "other.safetensors").is_file()
        assert torch.equal(outputs(load("llama", folder), "llama"), outputs(packed, "llama"))
    dequantize_checkpoint(tmp_path / "packed", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_an_upload_has_the_guard(folders, tmp_path, monkeypatch) -> None:
    from transformers.utils.hub import PushToHubMixin

    seen = []
    monkeypatch.setattr(PushToHubMixin, "_upload_modified_files", lambda self, folder, *a, **k: seen.append(
        json.loads((Path(folder) / "config.json").read_text())["transformers_weights"]))  # fmt: skip
    model = load("llama", folders("llama", 3)[1])
    model.config.save_pretrained(tmp_path)
    model._upload_modified_files(tmp_path, "someone/repository")
    assert seen == [GUARD_SENTENCE]
