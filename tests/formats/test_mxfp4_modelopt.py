"""MXFP4 of gpt-oss and NVFP4 of ModelOpt beyond their values: whole runs, and tensors that do not fit each other."""

import json

import pytest
import torch
from safetensors.torch import save_file

from formats.test_decoding import fixtures, laid_out
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.checkpoint.source.recognise import open_source
from kbitq.errors import CheckpointError

STEM = "model.layers.0.mlp.experts.down_proj"


def fixture_folder(place, kind):
    path, number, case = next(p.values for p in fixtures() if p.id.startswith(kind))
    return laid_out(place, path, number, case)


def test_a_run_leaves_out_what_described_the_source(tmp_path):
    folder = fixture_folder(tmp_path / "m", "modelopt")
    (folder / "hf_quant_config.json").write_text("{}")
    plan = plan_quantize(folder, tmp_path / "out", QuantizeOptions(k=3, include=("model.a.weight",)))
    assert any(note.startswith("hf_quant_config.json is not carried over") for note in plan.notes)
    run(plan)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "kbitq"
    ledger = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert ledger["source_formats"] == {"ModelOpt, NVFP4": 1}
    assert ledger["dropped"]["model.a.input_scale"].startswith("activation scale")


def test_a_run_over_experts(tmp_path):
    folder = fixture_folder(tmp_path / "m", "mxfp4")
    run(plan_quantize(folder, tmp_path / "out", QuantizeOptions(k=3, max_memory=1_000_000)))
    ledger = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert ledger["source_formats"] == {"MXFP4": 1}
    assert ledger["dropped"][f"{STEM}_scales"] == f"folded into {STEM}"


def u8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{STEM}_blocks": u8(2, 8, 2, 8), f"{STEM}_scales": u8(2, 8, 2)}, r"is not \[E, out, in / 32, 16\]"),
        ({f"{STEM}_blocks": u8(2, 8, 2, 16), f"{STEM}_scales": u8(2, 8, 3)}, "its shape"),
        ({"a.weight": u8(8, 12), "a.weight_scale_2": torch.ones(())}, "24 columns are not groups of 16"),
        ({"a.weight": u8(8, 8), "a.weight_scale_2": torch.ones(2)}, "one element"),
        ({"a.weight": u8(8, 8), "a.weight_scale_2": torch.ones(()), "a.weight_scale": torch.ones(8, 1)}, "dtype F32"),
        (
            {"a.weight": u8(8, 8), "a.weight_scale_2": torch.ones(()), "a.pre_quant_scale": torch.ones(16)},
            "pre_quant_scale",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path)
