"""Which tensors are quantized, and the reason each one is given."""

import pytest

from kbitq.choose.selection import Selection
from kbitq.errors import SelectionError

BIG, WIDE = (512, 512), (8, 64, 512)

CASES = [
    ("model.layers.0.self_attn.q_proj.weight", BIG, "BF16", "matrix"),
    ("model.layers.0.mlp.gate_proj.weight", BIG, "BF16", "matrix"),
    ("transformer.h.0.attn.c_attn.weight", BIG, "F32", "matrix"),
    ("transformer_blocks.0.norm1.linear.weight", BIG, "BF16", "matrix"),
    ("conv.weight", (64, 64, 3, 3), "F16", "matrix"),
    ("model.layers.0.mlp.experts.gate_up_proj", WIDE, "BF16", "fused experts"),
    ("model.layers.0.mlp.experts.0.up_proj.weight", BIG, "BF16", "matrix"),
    ("model.mtp.layers.0.proj.weight", BIG, "BF16", "matrix"),
    ("visual.blocks.0.attn.qkv.weight", BIG, "BF16", "matrix"),
    ("model.norm.weight", (512,), "BF16", "kept: norm"),
    ("h.0.ln_1.weight", (512,), "BF16", "kept: norm"),
    ("encoder.LayerNorm.bias", (512,), "BF16", "kept: norm"),
    ("model.q_norm.weight", BIG, "BF16", "kept: norm"),
    ("model.layers.0.q_proj.bias", (512,), "BF16", "kept: bias"),
    ("model.layers.0.mlp.experts.gate_up_proj_bias", (8, 1024), "BF16", "kept: bias"),
    ("model.embed_tokens.weight", BIG, "BF16", "kept: embedding"),
    ("transformer.wte.weight", BIG, "BF16", "kept: embedding"),
    ("transformer.wpe.weight", BIG, "BF16", "kept: embedding"),
    ("bert.embeddings.word_embeddings.weight", BIG, "BF16", "kept: embedding"),
    ("lm_head.weight", BIG, "BF16", "kept: output head"),
    ("score.weight", BIG, "BF16", "kept: output head"),
    ("classifier.dense.weight", BIG, "BF16", "kept: output head"),
    ("model.layers.0.mlp.gate.weight", BIG, "BF16", "kept: router"),
    ("model.layers.0.block_sparse_moe.gate.weight", BIG, "BF16", "kept: router"),
    ("model.layers.0.feed_forward.router.weight", BIG, "BF16", "kept: router"),
    ("model.layers.0.mlp.shared_expert_gate.weight", (1, 8192), "BF16", "kept: router"),
    ("model.small.weight", (63, 65), "BF16", "kept: fewer than 4,096 elements"),
    ("model.pos", BIG, "BF16", "kept: not a .weight"),
    ("model.A_log", (64, 128), "F32", "kept: not a .weight"),
    ("model.ids.weight", BIG, "I64", "kept: integers"),
    ("model.mask.weight", BIG, "BOOL", "kept: booleans"),
    ("model.a.weight", BIG, "F8_E4M3", "kept: F8_E4M3 is carried byte for byte"),
    ("model.a.weight", BIG, "F4", "kept: F4 is carried byte for byte"),
    ("model.a.weight", BIG, "C64", "kept: complex"),
    ("model.a.weight", (0, 512), "BF16", "kept: has no elements"),
    ("model.a.weight", (5000,), "BF16", "kept: a vector"),
    ("model.a.weight", (), "BF16", "kept: a scalar"),
    ("model.a.weight", (4096, 2), "BF16", "kept: would not shrink"),
    ("model.conv1d.weight", (4096, 1, 4), "BF16", "kept: would not shrink"),
]


def said(selection: Selection, name: str, shape: tuple[int, ...] = BIG, dtype: str = "BF16") -> str:
    verdict = selection.verdict(name, shape, dtype)
    assert (verdict.k is not None) == verdict.quantize
    return verdict.reason if verdict.quantize else f"kept: {verdict.reason}"


@pytest.mark.parametrize(("name", "shape", "dtype", "expected"), CASES)
def test_default(name: str, shape: tuple[int, ...], dtype: str, expected: str) -> None:
    assert said(Selection(3), name, shape, dtype) == expected


def test_include_adds_and_exclude_wins() -> None:
    selection = Selection(3, include=("lm_head*", "*embed*"), exclude=("*embed*", "re:layers\\.1\\."))
    assert said(selection, "lm_head.weight") == "included by 'lm_head*'"
    assert said(selection, "model.embed_tokens.weight") == "kept: excluded by '*embed*'"
    assert said(selection, "model.layers.1.up_proj.weight") == "kept: excluded by 're:layers\\.1\\.'"
    assert said(selection, "model.layers.11.up_proj.weight") == "matrix"
    assert said(selection, "lm_head.weight", (512,)) == "kept: a vector"


def test_only_replaces_the_default() -> None:
    selection = Selection(3, only=("*.down_proj.weight", "lm_head.weight"), include=("*embed*",))
    assert said(selection, "model.layers.0.down_proj.weight") == "selected by '*.down_proj.weight'"
    assert said(selection, "lm_head.weight") == "selected by 'lm_head.weight'"
    assert said(selection, "model.layers.0.up_proj.weight") == "kept: not matched by --only"
    assert said(selection, "model.embed.weight") == "included by '*embed*'"


def test_embeddings_may_be_quantized() -> None:
    assert said(Selection(3, keep_embeddings=False), "model.embed_tokens.weight") == "matrix"
    assert said(Selection(3, keep_embeddings=False), "lm_head.weight") == "kept: output head"


@pytest.mark.parametrize("option", ["include", "exclude", "only"])
def test_a_pattern_that_matches_nothing(option: str) -> None:
    selection = Selection(3, **{option: ("*", "*.dwon_proj.*")})
    with pytest.raises(SelectionError, match=rf"{option} '\*\.dwon_proj\.\*' matches no tensor"):
        selection.check_patterns(["model.layers.0.down_proj.weight"])


def test_a_pattern_that_is_no_expression() -> None:
    with pytest.raises(SelectionError, match="is not a regular expression"):
        said(Selection(3, include=("re:(",)), "a.weight")
