"""Quantized folders in transformers: what is packed, what it computes, and that nothing is missing or left over."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import kbitq
from helpers.small_models import auto_class, outputs
from helpers.small_models import load_complete as load
from helpers.tolerances import LOGITS, relative_error
from kbitq.nn import KbitEmbedding, KbitExperts, KbitLinear

KINDS = ["llama", "llama-tied", "moe", "gpt2", "bert", "vit"]
OPTIONS = [{}, {"keep_embeddings": False}]


def decoded(kind: str, folder: Path, tmp_path: Path, **options):
    """The same model from the folder that ``kbitq dequantize`` makes of it."""
    from kbitq.checkpoint import dequantize_checkpoint

    wide = "float32" if options.get("dtype") == torch.float32 else None  # a packed weight is not rounded to bfloat16
    dequantize_checkpoint(folder, tmp_path / "decoded", dtype=wide)
    return auto_class(kind).from_pretrained(tmp_path / "decoded", **options)


@pytest.mark.parametrize("options", OPTIONS, ids=["", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_model_computes_what_the_decoded_one_does(kind, options, folders, tmp_path, device) -> None:
    _, folder = folders(kind, 3, **options)
    for dtype in (torch.float32, torch.bfloat16):
        packed = load(kind, folder, dtype=dtype).to(device)
        reference = decoded(kind, folder, tmp_path / str(dtype), dtype=dtype)
        assert packed.dtype == dtype
        assert relative_error(outputs(packed, kind), outputs(reference, kind)) < LOGITS[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_the_folder_is_in_the_model(kind, folders) -> None:
    _, folder = folders(kind, 3, keep_embeddings=False)
    model = load(kind, folder)
    state = model.state_dict()
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        inside = name if name in state else None
        if kind in ("moe", "gpt2", "vit") or tensor.numel() == 0:
            continue  # merged, or decoded; the whole is compared above
        assert inside is not None, name
        assert state[inside].dtype == tensor.dtype
        assert torch.equal(state[inside], tensor)


def test_modules_of_each_kind(folders) -> None:
    llama = load("llama", folders("llama", 3)[1])
    assert isinstance(llama.model.layers[0].self_attn.q_proj, KbitLinear)
    assert type(llama.model.embed_tokens) is nn.Embedding
    assert type(llama.lm_head) is nn.Linear
    everything = load("llama", folders("llama", 3, keep_embeddings=False)[1])
    assert isinstance(everything.model.embed_tokens, KbitEmbedding)
    assert everything.get_input_embeddings().weight.shape == (320, 64)
    moe = load("moe", folders("moe", 3)[1])
    assert isinstance(moe.model.layers[0].mlp.experts, KbitExperts)
    assert moe.model.layers[0].mlp.experts.gate_up_proj_codebook.shape == (4, 2, 8)
    assert moe.model.layers[0].mlp.experts.down_proj_codebook.shape == (4, 1, 8)
    assert type(moe.model.layers[0].mlp.gate).__name__ == "Qwen3MoeTopKRouter"
    gpt2 = load("gpt2", folders("gpt2", 3)[1])
    assert type(gpt2.transformer.h[0].attn.c_attn).__name__ == "Conv1D"
    assert gpt2.transformer.h[0].attn.c_attn.weight.dtype == torch.bfloat16
    vit = load("vit", folders("vit", 3, keep_embeddings=False)[1])
    assert any(type(m) is nn.Conv2d for m in vit.modules())
    assert any(isinstance(m, KbitLinear) for m in vit.modules())


def test_statistics_of_the_file_come_along(folders) -> None:
    _, folder = folders("llama", 4)
    layer = load("llama", folder).model.layers[1].mlp.down_proj
    with safe_open(folder / "model.safetensors", "pt") as file:
        meta = json.loads(file.metadata()["kbitq"])["tensors"]["model.layers.1.mlp.down_proj.weight"]
    assert (layer.info.sqnr_db, layer.info.scale, layer.info.codebook) == (meta["sqnr_db"], "mse", "optimal")
    assert layer.info.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2", "bert"])
def test_tied_weights_are_one(kind, folders) -> None:
    model = load(kind, folders(kind, 4, keep_embeddings=False)[1])
    if kind == "bert":
        assert isinstance(model.embeddings.word_embeddings, KbitEmbedding)
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, KbitEmbedding)
    assert isinstance(head, KbitLinear)
    assert head.weight_packed is embedding.weight_packed
    assert head.weight_absmax is embedding.weight_absmax
    assert head.weight_codebook is embedding.weight_codebook
    model.tie_weights()  # users and libraries call it again
    assert head.weight_packed is embedding.weight_packed


def test_shards(folders, tmp_path) -> None:
    _source, whole = folders("llama", 3)
    _, sharded = folders("llama", 3, max_shard_size=40_000)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    a, b = load("llama", whole), load("llama", sharded)
    assert all(torch.equal(t, b.state_dict()[n]) for n, t in a.state_dict().items())


def test_base_model_of_a_causal_folder_and_back(folders, tmp_path) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    _, folder = folders("llama", 3)
    base, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == set()
    assert isinstance(base.layers[0].mlp.up_proj, KbitLinear)
    whole = load("llama", folder)
    assert torch.equal(base.layers[0].mlp.up_proj.weight_packed, whole.model.layers[0].mlp.up_proj.weight_packed)
    base.save_pretrained(tmp_path / "base")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    up = again.model.layers[0].mlp.up_proj
    assert torch.equal(up.weight_packed, whole.model.layers[0].mlp.up_proj.weight_packed)


def saved_as(like: Path, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a folder with these tensors and the config of another."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((like / "config.json").read_text())


def mixed(most: Path, others: Path, part: str, place: Path) -> Path:
    """A folder with the tensors of ``most``, those with ``part`` in their names of ``others``; no config."""
    a, b = (load_file(folder / "model.safetensors") for folder in (most, others))
    folder = place / "mixed"
    folder.mkdir()
    tensors = {name: (b if part in name else a)[name] for name in a}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_mixed_k(folders, tmp_path) -> None:
    """Two K in one folder, as a bit budget gives."""
    _, three = folders("llama", 3)
    _, five = folders("llama", 5)
    folder = mixed(three, five, "down_proj", tmp_path)
    config = json.loads((three / "config.json").read_text())
    config["quantization_config"]["overrides"] = {f"model.layers.{i}.mlp.down_proj": {"k": 5} for i in range(2)}
    (folder / "config.json").write_text(json.dumps(config))
    model = load("llama", folder)
    assert model.model.layers[0].mlp.down_proj.k == 5
    assert model.model.layers[0].mlp.up_proj.k == 3


def test_experts_of_different_k_are_decoded(folders, tmp_path) -> None:
    _, three = folders("moe", 3)
    _, five = folders("moe", 5)
    folder = mixed(three, five, "layers.1.mlp.experts.2.up_proj", tmp_path)
    (folder / "config.json").write_text((three / "config.json").read_text())
    model = load("moe", folder)
    assert isinstance(model.model.layers[0].mlp.experts, KbitExperts)
    odd = model.model.layers[1].mlp.experts
    assert isinstance(odd.gate_up_proj, nn.Parameter)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    q = kbitq.load_file(five / "model.safetensors")[name]
    assert torch.equal(odd.gate_up_proj[2, 72:], q.dequantize(torch.bfloat16))
    model.save_pretrained(tmp_path / "again")
    assert relative_error(outputs(load("moe", tmp_path / "again"), "moe"), outputs(model, "moe")) == 0


def test_a_partly_quantized_stack_is_refused(folders, tmp_path) -> None:
    _source, _ = folders("moe")
    _, folder = folders("moe", 3, exclude=("*layers.0.mlp.experts.1.up_proj.weight",))
    with pytest.raises(kbitq.KbitqError, match=r"experts\.1\.up_proj"):
        auto_class("moe").from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_on_load(kind, folders, tmp_path) -> None:
    _, folder = folders(kind, 3, keep_embeddings=False)
    dense = load(kind, folder, quantization_config=kbitq.KbitqConfig(dequantize=True))
    assert not any(isinstance(m, KbitLinear | KbitEmbedding | KbitExperts) for m in dense.modules())
    reference = decoded(kind, folder, tmp_path)
    assert relative_error(outputs(dense, kind), outputs(reference, kind)) == 0
    assert getattr(dense.config, "quantization_config", None) is None
    dense.save_pretrained(tmp_path / "dense")
    again = auto_class(kind).from_pretrained(tmp_path / "dense")
    assert relative_error(outputs(again, kind), outputs(dense, kind)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_after_loading(kind, folders) -> None:
    model = load(kind, folders(kind, 3, keep_embeddings=False)[1], dtype=torch.float32)
    before = outputs(model, kind)
    model.dequantize()
    assert not any(isinstance(m, KbitLinear | KbitEmbedding | KbitExperts) for m in model.modules())
    assert relative_error(outputs(model, kind), before) < LOGITS[torch.float32]


def test_device_map(folders, device) -> None:
    pytest.importorskip("accelerate")
    _, folder = folders("llama", 3)
    model = load("llama", folder, device_map=device)
    assert {p.device.type for p in model.parameters()} == {device}
    assert relative_error(outputs(model, "llama"), outputs(load("llama", folder), "llama")) < LOGITS[torch.bfloat16]
    auto = load("llama", folder, device_map="auto")
    assert relative_error(outputs(auto, "llama"), outputs(model, "llama")) < LOGITS[torch.bfloat16]


def test_offload_to_disk(folders, tmp_path) -> None:
    pytest.importorskip("accelerate")
    _, folder = folders("llama", 3)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    model = load("llama", folder, device_map=places, offload_folder=tmp_path / "offload")
    assert model.model.layers[1].mlp.up_proj.weight_packed.device.type == "meta"
    assert relative_error(outputs(model, "llama"), outputs(load("llama", folder), "llama")) == 0


def test_dtype_is_the_sources_where_the_config_has_none(folders, tmp_path) -> None:
    _, folder = folders("llama", 3)
    copy = tmp_path / "no-dtype"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (copy / "config.json").write_text(json.dumps(config))
    assert load("llama", copy).dtype == torch.bfloat16


def test_state_dict_instead_of_files(folders) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    _, folder = folders("llama", 3)
    state = load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    model, info = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, output_loading_info=True)
    assert info["missing_keys"] == set()
    assert relative_error(outputs(model, "llama"), outputs(load("llama", folder), "llama")) == 0


# -- what must not go wrong silently -----------------------------------------------------------------------------------


def test_load_report_is_silent(folders, caplog) -> None:
    import transformers

    logger = logging.getLogger("transformers")
    logger.propagate = True
    try:
        with caplog.at_level(logging.WARNING, logger="transformers"):
            load("llama", folders("llama", 3)[1])
            load("gpt2", folders("gpt2", 3)[1])
            load("moe", folders("moe", 3)[1])
    finally:
        logger.propagate = False
    assert [r.getMessage() for r in caplog.records if "LOAD REPORT" in r.getMessage()] == []
    assert transformers.logging is not None


"""Interpreters with other versions of transformers, for the guard (CONTRIBUTING.md)."""


DAMAGE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = {
    "a missing part": ("layers.0.mlp.up_proj.weight_absmax", None, r"up_proj\.weight_absmax is missing"),
    "parts that do not fit": (
        "layers.0.mlp.up_proj.weight_packed", lambda part: part[:, :-1].contiguous(),
        r"layers\.0\.mlp\.up_proj\.weight",
    ),
    "a level that is not finite": (
        "layers.1.mlp.up_proj.weight_codebook", lambda part: part.index_fill(0, torch.tensor([2]), float("nan")),
        r"layers\.1\.mlp\.up_proj\.weight_codebook",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_parts_are_an_error(damage, folders, tmp_path) -> None:
    _, folder = folders("llama", 3)
    tensors = load_file(folder / "model.safetensors")
    name, change, said = DAMAGE[damage]
    part = tensors.pop(f"model.{name}")
    if change is not None:
        tensors[f"model.{name}"] = change(part)
    saved_as(folder, tensors, tmp_path)
    with pytest.raises(kbitq.KbitqError, match=said):
        auto_class("llama").from_pretrained(tmp_path)


@pytest.mark.parametrize("change", [{"format_version": 3}, {"block_size": 64}, {"scale_format": "e8m0"}, {"k": 9}])
def test_a_format_not_known_is_an_error(change, folders, tmp_path) -> None:
    _, folder = folders("llama", 3)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(kbitq.KbitqError):
        auto_class("llama").from_pretrained(tmp_path)
