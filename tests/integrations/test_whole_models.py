"""Whole models: compiled, exported, real ones, and how much memory one takes."""

from pathlib import Path

import pytest
import torch

import kbitq
from helpers import fresh
from helpers.small_models import auto_class, llama_config, outputs, sample_inputs
from helpers.tolerances import LOGITS, relative_error
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run


def quantized(source: Path, out: Path, k: int, **options) -> Path:
    run(plan_quantize(source, out, QuantizeOptions(k=k, **options)))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"keep_embeddings": False}], ids=["", "all"])
def test_a_packed_model_compiles_in_one_graph(options, folders, device) -> None:
    model = auto_class("llama-tied").from_pretrained(folders("llama-tied", 3, **options)[1], dtype=torch.float32)
    model.to(device)
    expected = outputs(model, "llama-tied")
    ids = sample_inputs("llama-tied")["input_ids"].to(device)
    compiled = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True)
    with torch.no_grad():
        assert relative_error(compiled(ids), expected) < LOGITS[torch.float32]


@pytest.mark.slow
def test_a_packed_model_is_exported(folders) -> None:
    from transformers import LlamaForCausalLM

    class Logits(torch.nn.Module):
        def __init__(self, model: LlamaForCausalLM) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, use_cache=False).logits

    model = auto_class("llama").from_pretrained(folders("llama", 3)[1], dtype=torch.float32)
    ids = sample_inputs("llama")["input_ids"]
    exported = torch.export.export(Logits(model), (ids,), strict=False)
    assert any("kbitq.linear" in str(node.target) for node in exported.graph.nodes)
    assert relative_error(exported.module()(ids), outputs(model, "llama")) < LOGITS[torch.float32]


# -- real models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 4])
def test_pycode_llama(k, pycode_llama, tmp_path, device) -> None:
    """Four shards with an index, tied embeddings: logits of the packed model are those of the decoded one."""
    folder = quantized(pycode_llama, tmp_path / "packed", k, max_shard_size=6_000_000)
    packed = auto_class("llama").from_pretrained(folder).to(device)
    dense = auto_class("llama").from_pretrained(folder, quantization_config=kbitq.KbitqConfig(dequantize=True))
    ids = torch.arange(64).reshape(2, 32) * 97 % 8192
    with torch.no_grad():
        expected = dense(input_ids=ids).logits
        assert relative_error(packed(input_ids=ids.to(device)).logits, expected) < LOGITS[torch.bfloat16]
        one = packed(input_ids=ids[:1, :5].to(device)).logits  # few enough rows for the fused kernel
        assert relative_error(one, dense(input_ids=ids[:1, :5]).logits) < LOGITS[torch.bfloat16]
    if device == "cpu":
        kbitq.save_pretrained(packed, tmp_path / "again")
        for file in folder.glob("*.safetensors*"):
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_minilm(minilm, tmp_path, device) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = quantized(minilm, tmp_path / "packed", 4, keep_embeddings=False)
    packed, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == info["unexpected_keys"] == info["mismatched_keys"] == set()
    dense = AutoModel.from_pretrained(folder, quantization_config=kbitq.KbitqConfig(dequantize=True))
    batch = AutoTokenizer.from_pretrained(minilm)(
        ["Packed weights.", "A longer sentence, to pad the other."], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = dense(**batch).last_hidden_state
        found = packed.to(device)(**batch.to(device)).last_hidden_state
    assert relative_error(found, expected) < LOGITS[torch.float32]


def test_sentence_transformers(minilm, tmp_path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = quantized(minilm, tmp_path / "packed", 4)
    sentences = ["A man is playing a guitar.", "Someone makes music.", "The stock market fell."]
    original = sentence_transformers.SentenceTransformer(str(minilm), device="cpu").encode(sentences)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert any(isinstance(m, kbitq.nn.KbitLinear) for m in model.modules())
    embeddings = model.encode(sentences)
    similarity = (torch.tensor(original) * torch.tensor(embeddings)).sum(-1)
    assert similarity.min() > 0.95
    assert embeddings[0] @ embeddings[1] > embeddings[0] @ embeddings[2]


# -- memory ------------------------------------------------------------------------------------------------------------

MEASURE = """
import re, sys, torch, kbitq
from transformers import LlamaForCausalLM
import kbitq.integrations.transformers.routes, kbitq.integrations.transformers.saving

def status(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

warm = LlamaForCausalLM.from_pretrained(sys.argv[1])
warm(torch.zeros(1, 4, dtype=torch.int64))
del warm
before = status("VmRSS")
model = LlamaForCausalLM.from_pretrained(sys.argv[2])
with torch.no_grad():
    model(torch.zeros(1, 4, dtype=torch.int64))
print(status("VmHWM") - before, model.get_memory_footprint())
"""


@pytest.mark.slow
def test_loading_takes_the_packed_size_and_little_more(tmp_path, folders) -> None:
    """The peak of loading and of one forward pass, above a process that has done both with a tiny model."""
    if not Path("/proc/self/status").exists():
        pytest.skip("there is no /proc/self/status here")
    from transformers import LlamaForCausalLM

    config = llama_config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=2000, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    folder = quantized(tmp_path / "source", tmp_path / "packed", 3)
    source = (tmp_path / "source" / "model.safetensors").stat().st_size
    tiny = folders("llama", 3)[1]
    done = fresh.run("-c", MEASURE, tiny, folder)
    assert done.returncode == 0, done.stderr
    peak, footprint = map(int, done.stdout.split())
    one_tensor = 1024 * 3072 * 4
    assert footprint < 0.27 * source
    assert peak < footprint + one_tensor
