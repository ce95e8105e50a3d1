"""GGUF files as sources: Hugging Face's names and rows, exact values, rebuilt files, every job."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kbitq
from helpers.gguf_file import (
    f32,
    finite_blocks,
    gguf_bytes,
    llama_metadata,
    llama_tensors,
    to_ggml_rows,
)
from helpers.small_models import llama_config
from kbitq import functional
from kbitq.checkpoint import QuantizeOptions, dequantize_checkpoint, inspect, plan_quantize, run, verify
from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.errors import CheckpointError
from kbitq.format import matrix_shape
from kbitq.format.ggml_types import BY_NAME
from kbitq.ops.dtypes import TORCH_DTYPES

RNG = np.random.default_rng(7)
HEADS, KV_HEADS = 4, 2
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 64,
}
WORDS = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581ab"]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -4.0, -5.0, -6.0, -1.0, -2.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def blocks(kind, rows, cols):
    raw = finite_blocks(kind, rows * cols // BY_NAME[kind].values)
    return kind, (rows, cols), raw.tobytes()


def values(tensor):
    kind, shape, raw = tensor
    return functional.dequantize_gguf(torch.frombuffer(bytearray(raw), dtype=torch.uint8), kind, shape)


def llama():
    """One layer, a type for each matrix."""
    return {
        "token_embd.weight": blocks("Q8_0", 8, 256),
        "output_norm.weight": f32(RNG.random(256)),
        "blk.0.attn_norm.weight": f32(RNG.random(256)),
        "blk.0.attn_q.weight": blocks("Q4_K", 256, 256),
        "blk.0.attn_k.weight": blocks("Q6_K", 128, 256),
        "blk.0.attn_v.weight": blocks("IQ4_XS", 128, 256),
        "blk.0.attn_output.weight": ("F16", (256, 256), RNG.random((256, 256)).astype(np.float16).tobytes()),
        "blk.0.ffn_norm.weight": f32(RNG.random(256)),
        "blk.0.ffn_gate.weight": blocks("Q5_0", 512, 256),
        "blk.0.ffn_up.weight": blocks("IQ2_S", 512, 256),
        "blk.0.ffn_down.weight": blocks("MXFP4", 256, 512),
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    path.write_bytes(gguf_bytes(LLAMA | SPM, llama()))
    return path


def read(source, tile_bytes=1 << 20):
    """All tensors of a source by name, as the runs read them."""
    checkpoint = open_source(source)
    found = {}
    with TileReader(checkpoint, tile_bytes) as reader:
        for name, tensor in checkpoint.tensors.items():
            if len(tensor.shape) > 1:
                parts = [reader.read(tensor, span).clone().reshape(-1) for span in reader.spans(tensor)]
                found[name] = torch.cat(parts).view(matrix_shape(name, tensor.shape))
            else:
                raw = torch.cat([data.clone() for _, data in reader.chunks(tensor)])
                found[name] = raw.view(TORCH_DTYPES[tensor.dtype])
    return found


@pytest.mark.parametrize("tile_bytes", [1, 1 << 20])
def test_names_rows_and_values(file, tile_bytes):
    tensors, found = llama(), read(file, tile_bytes)
    layer = "model.layers.0."
    assert found["model.embed_tokens.weight"].equal(values(tensors["token_embd.weight"]))
    assert found[layer + "self_attn.v_proj.weight"].equal(values(tensors["blk.0.attn_v.weight"]))
    assert found[layer + "mlp.down_proj.weight"].equal(values(tensors["blk.0.ffn_down.weight"]))
    assert found[layer + "self_attn.o_proj.weight"].dtype == torch.float16
    assert found[layer + "input_layernorm.weight"].dtype == torch.float32
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours = found[f"{layer}self_attn.{part}_proj.weight"]
        assert not ours.equal(values(tensors[f"blk.0.attn_{part}.weight"]))
        assert to_ggml_rows(ours, heads).equal(values(tensors[f"blk.0.attn_{part}.weight"]))
    assert len(found) == len(tensors)


def test_files_are_rebuilt(file):
    checkpoint = open_source(file)
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "max_position_embeddings": 128, "num_hidden_layers": 1, "intermediate_size": 512, "hidden_size": 256,
        "rope_theta": 10000.0, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "head_dim": 64, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True, "vocab_size": 8,
        "attention_bias": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert checkpoint.carried == ["tokenizer.json", "tokenizer_config.json"]
    assert [n for n in checkpoint.notes if "quantized already" in n]


def test_every_job(file, tmp_path):
    out = tmp_path / "out"
    report = run(plan_quantize(file, out, QuantizeOptions(k=3)))
    assert report.totals["bytes_in"] == sum(len(raw) for _, _, raw in llama().values())
    ledger = json.loads((out / "quantization_report.json").read_text())
    assert ledger["source_formats"]["GGUF Q4_K"] == 1 and "GGUF F16" not in ledger["source_formats"]
    assert {p.name for p in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    weight = read(file)["model.layers.0.self_attn.q_proj.weight"]
    again = kbitq.quantize(weight, 3, name="model.layers.0.self_attn.q_proj.weight")
    assert kbitq.load_file(out)["model.layers.0.self_attn.q_proj.weight"].packed.equal(again.packed)
    assert not verify(out, source=file, full=True).problems
    assert inspect(file, ks=(3,)).totals["would"][3]["sqnr_db"] > 5


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_back_to_an_ordinary_checkpoint(file, tmp_path, dtype):
    dequantize_checkpoint(file, tmp_path / "plain", dtype=dtype)
    want, found = read(file), load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == want.keys()
    for name, values_ in found.items():
        moved = "norm" not in name and not name.endswith("o_proj.weight")
        assert values_.equal(want[name].to(torch.bfloat16) if dtype and moved else want[name])
    assert {p.name for p in (tmp_path / "plain").iterdir()} >= {"config.json", "tokenizer.json"}


NORM = np.linspace(-2, 2, 256, dtype=np.float32)


def rounded(vector, dtype):
    return torch.from_numpy(vector).to(dtype).float().numpy()


@pytest.mark.parametrize(
    ("architecture", "norms", "dtype", "said"),
    [
        ("llama", [rounded(NORM, torch.bfloat16), NORM.round()], torch.bfloat16, "bfloat16"),
        ("llama", [rounded(NORM, torch.float16), NORM.round()], torch.float16, "float16"),
        ("llama", [NORM, NORM.round()], torch.float32, "bfloat16"),
        ("llama", [NORM.round(), NORM.round() * 2.0**100], torch.bfloat16, "bfloat16"),
        ("llama", [rounded(NORM, torch.float16), NORM.round() * 2.0**100], torch.float32, "bfloat16"),
        ("gemma3", [rounded(NORM / 256, torch.bfloat16) + 1, NORM.round() + 1], torch.bfloat16, "bfloat16"),
    ],
    ids=["bfloat16", "float16", "neither", "large", "none holds all", "less one"],
)
def test_vectors_have_the_dtype_that_holds_them_all(tmp_path, architecture, norms, dtype, said):
    """llama.cpp stores norms and biases as float32; the output takes no wider dtype than their values need."""
    path = tmp_path / "m.gguf"
    tensors = {"output_norm.weight": f32(norms[0]), "blk.0.attn_norm.weight": f32(norms[1])}
    tensors["blk.0.ffn_up.weight"] = f32(NORM.reshape(8, 32))
    path.write_bytes(gguf_bytes({"general.architecture": architecture}, tensors))
    assert open_source(path).config["torch_dtype"] == said
    found = read(path)
    for name, norm in zip(("model.norm.weight", "model.layers.0.input_layernorm.weight"), norms, strict=True):
        assert found[name].dtype == dtype
        assert np.array_equal(found[name].float().numpy(), norm - np.float32(architecture == "gemma3"))
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_an_ordinary_checkpoint_is_not_turned_back(tmp_path):
    save_file({"a.weight": torch.ones(4, 4)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="is not quantized by kbitq"):
        dequantize_checkpoint(tmp_path / "m.safetensors", tmp_path / "out")


def test_a_set_of_files(tmp_path):
    tensors = list(llama().items())
    whole = gguf_bytes(LLAMA | SPM | {"split.count": 2}, dict(tensors[:4]))
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf is missing"):
        open_source(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(gguf_bytes({"split.no": 1}, dict(tensors[4:])))
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(gguf_bytes(LLAMA | SPM, dict(tensors)))
    want = read(alone)
    alone.unlink()
    for source in (tmp_path, tmp_path / "m-00002-of-00002.gguf"):
        found = read(source)
        assert found.keys() == want.keys()
        assert all(found[name].equal(want[name]) for name in want)


def test_files_of_several_models(file, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="of several models"):
        open_source(tmp_path)
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    assert open_source(tmp_path).config == {"model_type": "mine"}


def test_experts_become_a_tensor_each(tmp_path):
    kind, shape, raw = blocks("Q4_K", 3 * 128, 256)
    metadata = {**LLAMA, "llama.expert_count": 3, "llama.expert_used_count": 2}
    path = tmp_path / "moe.gguf"
    path.write_bytes(gguf_bytes(metadata, {**llama(), "blk.0.ffn_gate_exps.weight": (kind, (3, 128, 256), raw)}))
    found, want = read(path), values((kind, shape, raw)).view(3, 128, 256)
    for e in range(3):
        assert found[f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight"].equal(want[e])
    config = open_source(path).config
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 3, 2)


def test_biases_of_q_and_k_have_their_order_back(tmp_path):
    """llama.cpp's converter moves them with the rows."""
    bias, path = RNG.random(256).astype(np.float32), tmp_path / "m.gguf"
    q = {"blk.0.attn_q.bias": f32(to_ggml_rows(bias, HEADS)), "blk.0.attn_q.weight": blocks("Q4_K", 256, 256)}
    path.write_bytes(gguf_bytes(LLAMA, q))
    for tile_bytes in (1, 1 << 20):
        assert np.array_equal(read(path, tile_bytes)["model.layers.0.self_attn.q_proj.bias"].numpy(), bias)


def test_a_stack_of_an_unknown_architecture(tmp_path):
    kind, shape, raw = blocks("Q4_0", 6, 64)
    (tmp_path / "m.gguf").write_bytes(
        gguf_bytes({"general.architecture": "xyz"}, {"a.weight": (kind, (2, 3, 64), raw)})
    )
    for tile_bytes in (1, 1 << 20):
        found = read(tmp_path / "m.gguf", tile_bytes)["a.weight"]
        assert found.reshape(6, 64).equal(values((kind, shape, raw)))


def test_more_experts_than_any_model_has(tmp_path):
    kind, _, raw = blocks("Q4_0", 1 << 15, 32)
    tensors = {"blk.0.ffn_up_exps.weight": (kind, (1 << 15, 1, 32), raw)}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes({**LLAMA, "llama.expert_count": 2}, tensors))
    with pytest.raises(CheckpointError, match="32,768 experts"):
        open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize("freqs", [[0.0] * 8, [-1.0, 1.0], [float("nan")] * 4])
@pytest.mark.parametrize("theta", [-1.0, 0.0, 5e5])
def test_frequencies_that_make_no_sense_are_said(tmp_path, freqs, theta):
    metadata = {**LLAMA, "llama.rope.freq_base": theta}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, {**llama(), "rope_freqs.weight": f32(freqs)}))
    assert any("rope_freqs is of no known kind" in note for note in open_source(tmp_path / "m.gguf").notes)


def test_gemma_has_its_norms_back(tmp_path):
    norm = RNG.random(256).astype(np.float32)
    path = tmp_path / "gemma.gguf"
    tensors = {"token_embd.weight": blocks("Q8_0", 8, 256), "output_norm.weight": f32(norm)}
    tensors["blk.0.post_attention_norm.weight"] = f32(norm)
    path.write_bytes(gguf_bytes({"general.architecture": "gemma3"}, tensors))
    found = read(path)
    assert found["model.norm.weight"].numpy() == pytest.approx(norm - 1)
    assert found["model.layers.0.post_attention_layernorm.weight"].equal(found["model.norm.weight"])


@pytest.mark.parametrize("kind", ["F32", "Q5_1"])
def test_gpt2_has_its_matrices_turned_back(tmp_path, kind):
    tensor = f32(RNG.random((96, 64))) if kind == "F32" else blocks(kind, 96, 64)
    path = tmp_path / "gpt2.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "gpt2"}, {"blk.3.ffn_up.weight": tensor}))
    for tile_bytes in (1, 1 << 20):
        found = read(path, tile_bytes)["transformer.h.3.mlp.c_fc.weight"]
        assert found.shape == (64, 96) and found.t().equal(values(tensor))


def test_an_architecture_that_is_not_known_keeps_its_names(tmp_path):
    path = tmp_path / "new.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "xyz"}, {"blk.0.ffn_up.weight": blocks("Q4_0", 4, 64)}))
    checkpoint = open_source(path)
    assert list(checkpoint.tensors) == ["blk.0.ffn_up.weight"] and checkpoint.config is None
    assert any("architecture 'xyz' is not known" in note for note in checkpoint.notes)
    assert any("tokenizer.json cannot be rebuilt" in note for note in checkpoint.notes)


def test_heads_that_do_not_fit(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf_bytes({**LLAMA, "llama.attention.head_count": 7}, llama()))
    with pytest.raises(CheckpointError, match="do not fit the heads"):
        open_source(path)


def test_llama3_frequencies_become_fields(tmp_path):
    from kbitq.formats.gguf.llama3_rope import _factor, llama3_scaling

    freqs = [_factor(i, 32, 500000.0, 32.0) for i in range(32)]
    path = tmp_path / "three.gguf"
    metadata = {**LLAMA, "llama.rope.freq_base": 500000.0}
    path.write_bytes(gguf_bytes(metadata, {**llama(), "rope_freqs.weight": f32(freqs)}))
    checkpoint = open_source(path)
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert "rope_freqs.weight" not in checkpoint.tensors
    assert llama3_scaling([1.0, 5.0, 2.0], 10000.0) is None


@pytest.mark.slow
def test_the_model_is_the_one_that_was_converted(tmp_path):
    """transformers computes the same from a model, and from its GGUF file by way of the source's values and config."""
    transformers = pytest.importorskip("transformers")
    config = llama_config()
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: p.detach().numpy() for name, p in model.state_dict().items()}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(llama_metadata(config), llama_tensors(state, 4, 2)))
    dequantize_checkpoint(path, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
