"""Outputs in other tools' formats, loaded and run by transformers with the formats' own packages, where these are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kbitq.checkpoint import QuantizeOptions, dequantize_checkpoint, plan_quantize, run
from kbitq.choose.selection import TensorRule

PACKAGES = {"bnb-nf4": "bitsandbytes", "bnb-nf4-double": "bitsandbytes", "gptq": "gptqmodel", "gptq-g32": "gptqmodel"}
ACTIVATIONS = ("int8", "fp8", "fp8-block")  # formats that quantize these, too
SAME = 0.02  # of the logits' norm: sums in another order, in bfloat16
# What the logits may differ from those of the source, as a share of their norm.
LOADED = [("compressed-tensors", 4, 0.4), ("compressed-tensors-channel", 8, 0.05), ("int8", 8, 0.06), ("fp8", 8, 0.15),
          ("fp8-block", 8, 0.15), ("gptq", 4, 0.4), ("gptq-g32", 8, 0.05), ("bnb-nf4", 4, 0.4),
          ("bnb-nf4-double", 4, 0.4)]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, GPTQConfig

    options = {}
    said = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    if said.get("quant_method") == "gptq":  # its other kernels are compiled when they are first used
        options["quantization_config"] = GPTQConfig(bits=said["bits"], backend="gptq_torch")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    with torch.no_grad():
        return model(torch.arange(24)[None]).logits.float()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("codec, k, bound", LOADED)
def test_transformers_loads_and_runs_it(source: Path, tmp_path: Path, codec: str, k: int, bound: float) -> None:
    pytest.importorskip(PACKAGES.get(codec, "compressed_tensors"))
    run(plan_quantize(source, tmp_path / "out", QuantizeOptions(k=k, codec=codec)))
    want, got = logits(source), logits(tmp_path / "out")
    assert 0 < (got - want).norm() < bound * want.norm()
    if codec not in ACTIVATIONS:
        dequantize_checkpoint(tmp_path / "out", tmp_path / "plain")
        assert (got - logits(tmp_path / "plain")).norm() < SAME * want.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("codec", ["compressed-tensors", "gptq"])
def test_tensors_may_be_kept_or_have_other_bits(source: Path, tmp_path: Path, codec: str) -> None:
    pytest.importorskip(PACKAGES.get(codec, "compressed_tensors"))
    rules = [TensorRule("*layers.0.mlp*", keep=True)]
    if codec == "compressed-tensors":
        rules.append(TensorRule("*layers.1.self_attn*", k=8))
    run(plan_quantize(source, tmp_path / "out", QuantizeOptions(k=4, codec=codec, rules=tuple(rules))))
    dequantize_checkpoint(tmp_path / "out", tmp_path / "plain")
    want = logits(tmp_path / "plain")
    assert (logits(tmp_path / "out") - want).norm() < SAME * want.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("codec", ["bnb-nf4", "bnb-nf4-double"])
def test_nf4_is_byte_for_byte_what_bitsandbytes_saves(source: Path, tmp_path: Path, codec: str) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=codec.endswith("double")
    )
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=settings, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "theirs")
    run(plan_quantize(source, tmp_path / "ours", QuantizeOptions(k=4, codec=codec)))
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert set(theirs) == set(ours)
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype and torch.equal(tensor, ours[name]), name
