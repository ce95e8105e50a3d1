"""Weights that are made up, for a server that measures its speed: coded as the config says, and finite."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.served_layers import Method
from kbitq.errors import CodebookError
from kbitq.integrations.serving import dummy
from kbitq.integrations.serving.experts import ArrivingExperts, PackedExperts
from kbitq.integrations.serving.names import StoredNames
from kbitq.integrations.serving.vocabulary import PackedVocabulary

CONFIG: dict[str, Any] = {
    "quant_method": "kbitq", "format_version": 2, "block_size": 32, "scale_format": "e4m4", "k": 3,
    "overrides": {
        "a.k_proj": {"k": 2, "codec": "trellis", "scale_block": 128},
        "a.down_proj": {"k": 4, "codec": "trellis", "scale_block": 128},
        "m.experts.0.up_proj": {"k": 5}, "m.experts.1.up_proj": {"k": 5}, "m.experts.1.gate_proj": {"k": 4},
    },
    "modules_to_not_convert": ["a.v_proj"],
}  # fmt: skip


def made_up(modules: list[str], rows: list[int], cols: int, whole: int) -> tuple[Any, Method]:
    layer, method = torch.nn.Module(), Method(StoredNames.of(CONFIG), modules[0], modules)
    method.create_weights(layer, cols, rows, whole, sum(rows), torch.float32, weight_loader=lambda *_: None)
    method.process_weights_after_loading(layer)
    return layer, method


def test_a_fused_layer_is_coded_as_its_parts_are() -> None:
    layer, method = made_up(["a.q_proj", "a.k_proj", "a.v_proj"], [40, 16, 24], 256, 256)
    assert [type(piece).__name__ for piece in layer.kbitq_pieces] == ["CodedPiece", "CodedPiece", "DensePiece"]
    assert [piece.codec for piece in layer.kbitq_pieces[:2]] == ["planes", "trellis/128"]
    weight = method.dequantize_weight(layer)
    assert weight.shape == (80, 256) and bool(weight.isfinite().all())
    assert 0.01 < float(weight.std()) < 0.04
    out = method.apply(layer, torch.randn(3, 256))
    assert out.shape == (3, 80) and bool(out.isfinite().all()) and float(out.std()) > 0


def test_a_layer_that_is_cut() -> None:
    layer, method = made_up(["a.down_proj"], [32], 128, 256)
    assert method.dequantize_weight(layer).shape == (32, 128)
    with pytest.raises(ValueError, match="its 192 inputs cannot be split over 2 devices"):
        made_up(["a.down_proj"], [32], 96, 192)


def test_a_vocabulary() -> None:
    layer: Any = torch.nn.Module()
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=70)
    method = PackedVocabulary(StoredNames.of(CONFIG), "lm_head", True, dummy=True)
    method.create_weights(layer, 40, [96], 40, 70, torch.float32, weight_loader=None)
    method.process_weights_after_loading(layer)
    assert bool(method.embedding(layer, torch.tensor([0, 69])).isfinite().all())
    assert method.apply(layer, torch.randn(2, 40)).shape == (2, 96)


@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated: bool) -> None:
    stored = StoredNames.of(CONFIG)
    arriving = ArrivingExperts("m.experts", 3, 64, 32, 2, stored.codecs)
    arriving.make_up(stored.coding_below("m.experts"), gated, 1, torch.device("cpu"))
    found = arriving.finished(torch.float32)
    assert [(m.k, m.rows, m.cols) for m in found[2]] == [(5, 32, 64)] * (1 + gated) + [(5, 64, 32)]
    experts = PackedExperts(found, lambda hidden: hidden[:, :32])
    out = experts(torch.randn(4, 64), torch.full((4, 2), 0.5), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]]))
    assert bool(out.isfinite().all()) and float(out.abs().sum()) > 0


def test_codings_of_modules_a_server_calls_otherwise() -> None:
    stored = StoredNames.of(CONFIG).renamed(lambda names: [f"lm.{name}" for name in names if "down" not in name])
    assert stored.codings_of(["lm.a.k_proj", "lm.a.v_proj", "lm.a.q_proj"]) == [("trellis/128", 2), None, ("planes", 3)]
    assert stored.coding_below("lm.m.experts") == ("planes", 5)
    assert stored.coding_below("lm.a.b") == ("planes", 3)


def test_a_k_that_there_is_not() -> None:
    with pytest.raises(CodebookError, match="K"):
        dummy.parts_of(("planes", 0), 4, 32, torch.device("cpu"))
