"""Packed models back to folders, and models quantized while they load."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import kbitq
from helpers.small_models import auto_class, make_model, outputs, sample_inputs
from kbitq.nn import KbitEmbedding, KbitExperts, KbitLinear, replace_linears

PACKED_WHOLE = ["llama", "llama-tied", "moe", "bert"]  # no quantized tensor of these is decoded on load
ALL = {"keep_embeddings": False}


def load(kind: str, folder: Path, **options):
    return auto_class(kind).from_pretrained(folder, **options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(t.dtype == b[n].dtype and torch.equal(t, b[n]) for n, t in a.items())


def digests(folder: Path) -> dict[str, str]:
    files = [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def quantization_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("options", [{}, ALL], ids=["", "all"])
@pytest.mark.parametrize("kind", PACKED_WHOLE)
def test_save_pretrained_keeps_every_byte(kind, options, folders, tmp_path) -> None:
    _, folder = folders(kind, 3, **options)
    load(kind, folder).save_pretrained(tmp_path)
    assert same(weights(tmp_path), weights(folder))
    assert quantization_config(tmp_path) == quantization_config(folder)
    assert kbitq.load_file(tmp_path).keys() == kbitq.load_file(folder).keys()  # our reader checks every triple
    again = load(kind, tmp_path)
    assert same(again.state_dict(), load(kind, folder).state_dict())


@pytest.mark.parametrize("options", [{}, ALL, {"max_shard_size": 40_000}], ids=["", "all", "shards"])
@pytest.mark.parametrize("kind", PACKED_WHOLE)
def test_our_save_gives_identical_files(kind, options, folders, tmp_path) -> None:
    _, folder = folders(kind, 3, **options)
    kbitq.save_pretrained(load(kind, folder), tmp_path)
    assert digests(tmp_path) == digests(folder)
    assert quantization_config(tmp_path) == quantization_config(folder)
    assert same(load(kind, tmp_path).state_dict(), load(kind, folder).state_dict())


def test_shards_of_transformers(folders, tmp_path) -> None:
    _, folder = folders("moe", 3)
    load("moe", folder).save_pretrained(tmp_path, max_shard_size=60_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(weights(tmp_path), weights(folder))
    assert kbitq.load_file(tmp_path).keys() == kbitq.load_file(folder).keys()
    assert same(load("moe", tmp_path).state_dict(), load("moe", folder).state_dict())


def test_our_save_in_shards_of_another_size(folders, tmp_path) -> None:
    _, folder = folders("llama", 3)
    kbitq.save_pretrained(load("llama", folder), tmp_path, max_shard_size=40_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert same(weights(tmp_path), weights(folder))
    assert same(load("llama", tmp_path).state_dict(), load("llama", folder).state_dict())


@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_what_was_decoded_on_load_is_saved_decoded(kind, folders, tmp_path) -> None:
    _, folder = folders(kind, 3, **ALL)
    model = load(kind, folder)
    for name, save in (("a", model.save_pretrained), ("b", lambda path: kbitq.save_pretrained(model, path))):
        save(tmp_path / name)
        again, info = auto_class(kind).from_pretrained(tmp_path / name, output_loading_info=True)
        assert info["missing_keys"] == info["unexpected_keys"] == set()
        assert torch.equal(outputs(again, kind), outputs(model, kind))
        assert any(isinstance(m, KbitLinear | KbitEmbedding) for m in again.modules())


def test_saving_under_the_models_own_names(folders, tmp_path) -> None:
    """``save_original_format=False`` writes stacks as the model has them; they load again."""
    model = load("moe", folders("moe", 3)[1])
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj_packed" in weights(tmp_path)


def test_guard_and_metadata_of_a_saved_folder(folders, tmp_path) -> None:
    _, folder = folders("moe", 3)
    load("moe", folder).save_pretrained(tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as a, safe_open(tmp_path / "model.safetensors", "pt") as b:
        assert json.loads(a.metadata()["kbitq"]) == json.loads(b.metadata()["kbitq"])
        guards = [n for n in b.keys() if b.get_slice(n).get_shape() == [0]]  # noqa: SIM118
    assert guards == ["model.layers.0.mlp.experts.0.down_proj.weight"]


def test_a_cast_model_saves_the_same_weights(folders, tmp_path) -> None:
    _, folder = folders("llama", 3)
    load("llama", folder, dtype=torch.float32).save_pretrained(tmp_path)
    packed = {n: t for n, t in weights(folder).items() if n.endswith(("_packed", "_absmax", "_codebook"))}
    saved = weights(tmp_path)
    assert all(torch.equal(saved[n], t) for n, t in packed.items())
    assert saved["model.norm.weight"].dtype == torch.float32
    assert quantization_config(tmp_path) == quantization_config(folder)


def test_an_ordinary_model_is_refused_by_our_save(tmp_path) -> None:
    with pytest.raises(kbitq.KbitqError, match="no weight quantized by kbitq"):
        kbitq.save_pretrained(make_model("llama"), tmp_path)


# -- on the fly --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, ALL], ids=["", "all"])
@pytest.mark.parametrize("kind", PACKED_WHOLE)
def test_on_the_fly_is_quantize_then_load(kind, options, folders, tmp_path) -> None:
    source, folder = folders(kind, 3, **options)
    model, info = auto_class(kind).from_pretrained(
        source, quantization_config=kbitq.KbitqConfig(k=3, **options), output_loading_info=True
    )
    assert info["missing_keys"] == info["unexpected_keys"] == set()
    assert same(model.state_dict(), load(kind, folder).state_dict())
    if kind == "moe":  # a stack knows no statistics of its parts
        model.save_pretrained(tmp_path)
        assert same(weights(tmp_path), weights(folder))
    else:
        kbitq.save_pretrained(model, tmp_path)
        assert digests(tmp_path) == digests(folder)
    assert quantization_config(tmp_path) == quantization_config(folder)
    assert same(load(kind, tmp_path).state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_on_the_fly_leaves_other_modules_alone(kind, folders) -> None:
    source, _ = folders(kind)
    model = load(kind, source, quantization_config=kbitq.KbitqConfig(k=4, **ALL))
    dense = load(kind, source)
    kinds = {type(m) for m in model.modules()}
    assert kinds & {KbitLinear, KbitEmbedding}
    for name, module in dense.named_modules():
        if type(module).__name__ in ("Conv1D", "Conv2d"):
            assert torch.equal(model.get_submodule(name).weight, module.weight)


def test_on_the_fly_options(folders) -> None:
    source, _ = folders("llama")
    config = kbitq.KbitqConfig(
        k=5,
        scale="absmax",
        codebook="nf",
        exclude=["*q_proj*"],
        modules_to_not_convert=["up_proj"],
        include=["lm_head*"],
    )
    model = load("llama", source, quantization_config=config)
    attention = model.model.layers[0].self_attn
    assert type(attention.q_proj) is nn.Linear
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear
    assert isinstance(attention.o_proj, KbitLinear)
    assert isinstance(model.lm_head, KbitLinear)
    dense = load("llama", source).model.layers[0].self_attn.o_proj.weight
    q = kbitq.quantize(dense, 5, scale="absmax", codebook="nf")
    assert torch.equal(attention.o_proj.weight_packed, q.packed)
    assert attention.o_proj.info.codebook == "nf"


def test_on_the_fly_of_a_quantized_folder_is_the_folder(folders) -> None:
    _, folder = folders("llama", 3)
    with pytest.warns(UserWarning, match="quantization_config"):
        model = load("llama", folder, quantization_config=kbitq.KbitqConfig(k=5))
    assert model.model.layers[0].mlp.up_proj.k == 3


def test_on_the_fly_with_a_device_map(folders) -> None:
    pytest.importorskip("accelerate")
    source, folder = folders("llama", 3)
    model = load("llama", source, quantization_config=kbitq.KbitqConfig(k=3), device_map="auto")
    assert same(model.state_dict(), load("llama", folder).state_dict())


def test_a_model_quantized_in_memory_is_saved(folders, tmp_path) -> None:
    source, folder = folders("llama", 3)
    model = load("llama", source)
    replace_linears(model, 3)
    kbitq.save_pretrained(model, tmp_path)
    assert same(weights(tmp_path), weights(folder))
    assert same(load("llama", tmp_path).state_dict(), model.state_dict())
    assert getattr(model.config, "quantization_config", None) is None


def test_experts_quantized_in_memory_are_saved(folders, tmp_path) -> None:
    source, _ = folders("moe", 3)
    model = load("moe", source)
    replace_linears(model, 3)
    assert isinstance(model.model.layers[0].mlp.experts, KbitExperts)
    kbitq.save_pretrained(model, tmp_path)
    again = load("moe", tmp_path)
    assert torch.equal(outputs(again, "moe"), outputs(model, "moe"))


def test_config_object() -> None:
    config = kbitq.KbitqConfig(k=3, exclude=["*.down_proj.weight"])
    again = kbitq.KbitqConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert json.loads(config.to_json_string())["k"] == 3
    with pytest.raises(kbitq.KbitqError, match="not 9"):
        kbitq.KbitqConfig(k=9)


def test_generation_runs_on_packed_weights(folders) -> None:
    model = load("llama", folders("llama", 4)[1])
    ids = sample_inputs("llama", rows=1)["input_ids"]
    made = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.dequantize()
    assert torch.equal(made, model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0))
