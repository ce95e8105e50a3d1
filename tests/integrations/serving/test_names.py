"""What a folder's names say of a server's modules."""

from typing import Any

import pytest

from kbitq.errors import CodecError, FormatError
from kbitq.integrations.serving.names import StoredNames

CONFIG: dict[str, Any] = {
    "quant_method": "kbitq", "format_version": 2, "block_size": 32, "scale_format": "e4m4", "k": 3,
    "overrides": {"model.layers.0.mlp.up_proj": {"k": 4, "codec": "trellis"}},
    "modules_to_not_convert": ["model.layers.0.self_attn.v_proj"],
}  # fmt: skip
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def parts(name: str) -> list[str]:
    return [f"{name}_{part}" for part in ("packed", "absmax", "codebook")]


NAMES = [
    *parts("model.embed_tokens.weight"), "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    "model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.v_proj.bias",
    *parts("model.layers.0.self_attn.q_proj.weight"), *parts("model.layers.0.mlp.up_proj.weight"),
    "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight",
    *parts("model.layers.2.mlp.experts.gate_up_proj"), "stray.weight_packed",
]  # fmt: skip


def test_names_of_files() -> None:
    stored = StoredNames.of(CONFIG, NAMES)
    assert stored.codecs == ("planes", "trellis")
    assert stored.guard == "model.embed_tokens.weight"
    states = {
        "model.embed_tokens": True,
        "lm_head": False,
        "model.layers.0.self_attn.qkv_proj": True,
        "model.layers.0.mlp.gate_up_proj": True,
        "model.layers.1.mlp.gate_up_proj": False,
        "": None,
        "qkv_proj": None,
        "stray": None,
        "visual.proj": None,
    }
    assert {name: stored.is_quantized(name, FUSED) for name in states} == states
    assert [stored.has_experts(f"model.layers.{i}.mlp.experts") for i in (1, 2)] == [False, True]


def test_a_server_s_own_names() -> None:
    stored = StoredNames.of(CONFIG, NAMES).renamed(lambda names: [f"language_model.{name}" for name in names])
    assert stored.is_quantized("language_model.model.layers.0.self_attn.qkv_proj", FUSED) is True
    assert stored.is_quantized("language_model.lm_head", FUSED) is False


def test_without_names_the_config_says_what_is_kept() -> None:
    stored = StoredNames.of(CONFIG)
    assert stored.is_quantized("model.layers.0.self_attn.v_proj", FUSED) is False
    assert stored.is_quantized("model.layers.0.self_attn.o_proj", FUSED) is None
    assert stored.is_quantized("model.layers.0.self_attn.qkv_proj", FUSED) is None  # of it v alone is known to be kept
    assert stored.has_experts("model.layers.0.mlp.experts")


def test_folders_that_this_kbitq_cannot_read_are_refused() -> None:
    with pytest.raises(FormatError, match="format_version 9"):
        StoredNames.of({**CONFIG, "format_version": 9})
    with pytest.raises(CodecError, match="codec 'lattice' is not known"):
        StoredNames.of({**CONFIG, "codec": "lattice"}, NAMES)
