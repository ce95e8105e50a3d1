"""FP8 sources with scales decode on the fly; the scales and the old config are gone from the output."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kbitq
from helpers.checkpoints import gaussian, write_folder
from kbitq.checkpoint import RunReport, dequantize_checkpoint
from kbitq.errors import CheckpointError, NonFiniteError

Quantize = Callable[..., RunReport]
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    return (gaussian(*shape, seed=seed, dtype=torch.float32) * 1000).to(torch.float8_e4m3fn)


def expand(scale: torch.Tensor, shape: torch.Size, height: int, width: int) -> torch.Tensor:
    tall = scale.repeat_interleave(height, -2).repeat_interleave(width, -1)
    return tall[..., : shape[-2], : shape[-1]]


def exponent_bytes(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(110, 130, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


CASES = {
    "block": ((300, 200), (3, 2), torch.float32, (128, 128)),
    "block bf16": ((300, 200), (3, 2), torch.bfloat16, (128, 128)),
    "per tensor": ((300, 200), (), torch.float32, (300, 200)),
    "per tensor, one element": ((300, 200), (1,), torch.float32, (300, 200)),
    "per row": ((300, 200), (300, 1), torch.float32, (1, 200)),
    "ue8m0": ((300, 200), (3, 2), "exponent", (128, 128)),
    "experts": ((3, 130, 140), (3, 2, 2), torch.float32, (128, 128)),
    "rows longer than a tile": ((3, 70_000), (1, 547), torch.float32, (128, 128)),
}


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("case", CASES)
def test_decoded_as_the_scales_say(tmp_path: Path, quantize: Quantize, case: str, suffix: str) -> None:
    shape, scale_shape, dtype, (height, width) = CASES[case]
    name = "model.mlp.experts.up_proj" if len(shape) == 3 else "model.up_proj.weight"
    stored = fp8(*shape)
    if dtype == "exponent":
        scale = exponent_bytes(scale_shape)
        values = torch.exp2(scale.float() - 127)
    else:
        scale = (torch.rand(scale_shape, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)
        values = scale.float()
    whole = values.expand(shape) if values.numel() == 1 else expand(values, stored.shape, height, width)
    expected = (stored.float() * whole).to(torch.bfloat16)
    source = write_folder(tmp_path / "fp8", {name: stored, name + suffix: scale, "model.norm.weight": torch.ones(4)})
    (source / "config.json").write_text(json.dumps({"a": 1, "quantization_config": DEEPSEEK}))
    quantize(source, tmp_path / "out", max_memory=1)
    got = kbitq.load_file(tmp_path / "out")
    assert got.keys() == {name, "model.norm.weight"}
    again = kbitq.quantize(expected, 3, name=name)
    assert got[name].dtype == torch.bfloat16
    assert got[name].packed.equal(again.packed) and got[name].absmax.equal(again.absmax)
    assert got[name].codebook.equal(again.codebook)
    assert got[name].sqnr_db == round(again.sqnr_db, 4)


def test_kept_weights_are_written_decoded_and_scales_may_be_elsewhere(tmp_path: Path, quantize: Quantize) -> None:
    tensors = {
        "a.weight": fp8(256, 128, seed=1), "lm_head.weight": fp8(200, 128, seed=2),
        "a.weight_scale_inv": torch.tensor([[0.5], [2.0]]), "lm_head.weight_scale_inv": torch.tensor([[0.25], [3.0]]),
        "a.input_scale": torch.tensor(1.0),
    }  # fmt: skip
    source = write_folder(tmp_path / "fp8", tensors, shards=2)
    text = {"quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps({"quantization_config": DEEPSEEK, "text_config": {"b": 2, **text}}))
    report = quantize(source, tmp_path / "out")
    out = load_file(tmp_path / "out" / "model.safetensors")
    scale = expand(tensors["lm_head.weight_scale_inv"], torch.Size((200, 128)), 128, 128)
    assert out["lm_head.weight"].equal((tensors["lm_head.weight"].float() * scale).to(torch.bfloat16))
    assert not any("scale" in name for name in out)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "kbitq" and config["text_config"] == {"b": 2}
    ledger = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert ledger["dropped"]["a.weight_scale_inv"] == "folded into a.weight" and "a.input_scale" in ledger["dropped"]
    assert report.totals["bytes_in"] == 256 * 128 + 200 * 128
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors")["a.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(2, 2), (3,), (1, 2, 1)])
def test_scales_that_do_not_fit(tmp_path: Path, quantize: Quantize, shape: tuple[int, ...]) -> None:
    save_file({"a.weight": fp8(300, 128), "a.weight_scale_inv": torch.ones(shape)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight_scale_inv: its shape .* does not fit a\.weight \[300, 128\]"):
        quantize(tmp_path / "m.safetensors")


def test_scales_of_a_strange_dtype(tmp_path: Path, quantize: Quantize) -> None:
    scale = torch.ones(3, 1, dtype=torch.int64)
    save_file({"a.weight": fp8(300, 128), "a.weight_scale_inv": scale}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="I64 is not known as the dtype of a scale"):
        quantize(tmp_path / "m.safetensors")


@pytest.mark.parametrize("bad", ["value", "scale"])
def test_nan_in_fp8(tmp_path: Path, quantize: Quantize, bad: str) -> None:
    w, scale = fp8(300, 128), torch.ones(3, 1)
    if bad == "value":
        w.view(torch.uint8)[7, 9] = 0x7F
    else:
        scale[1] = torch.nan
    save_file({"a.weight": w, "a.weight_scale_inv": scale}, tmp_path / "m.safetensors")
    with pytest.raises(NonFiniteError, match=r"\[7, 9\]" if bad == "value" else r"\[128, 0\]"):
        quantize(tmp_path / "m.safetensors")


def test_fp8_without_scales_is_carried_and_said_so(tmp_path: Path, quantize: Quantize) -> None:
    w = fp8(64, 64)
    save_file({"a.weight": w, "b.weight": gaussian(64, 64)}, tmp_path / "m.safetensors")
    report = quantize(tmp_path / "m.safetensors", tmp_path / "q.safetensors")
    assert next(t for t in report.tensors if t["name"] == "a.weight")["reason"] == "F8_E4M3 is carried byte for byte"
    assert load_file(tmp_path / "q.safetensors")["a.weight"].view(torch.uint8).equal(w.view(torch.uint8))
