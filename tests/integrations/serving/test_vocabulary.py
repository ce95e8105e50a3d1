"""A server's embedding and output head, apart and tied."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kbitq
from kbitq.integrations.serving.names import StoredNames
from kbitq.integrations.serving.vocabulary import PackedVocabulary
from kbitq.quantized import QuantizedTensor

STORED = StoredNames(("planes", "trellis"))
ROWS, COLS = 70, 40


def table(k: int = 4, codec: str = "planes") -> QuantizedTensor:
    return kbitq.quantize(torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)), k, codec=codec)


def layer_for(begin: int, end: int, padded: int, head: bool, device: str = "cpu") -> Any:
    layer: Any = torch.nn.Module()
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=end)
    layer.quant_method = PackedVocabulary(STORED, "", head)
    with torch.device(device):
        layer.quant_method.create_weights(layer, COLS, [padded], COLS, ROWS, torch.float32, weight_loader=None)
    return layer


def load(layer: Any, weight: QuantizedTensor | torch.Tensor) -> None:
    parts = {"weight": weight} if isinstance(weight, torch.Tensor) else dict(weight.parts)
    for name, tensor in parts.items():
        held = layer.get_parameter(name if name == "weight" else f"weight_{name}")
        held.weight_loader(held, tensor)
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(("k", "codec"), [(4, "planes"), (7, "planes"), (2, "trellis")])
@pytest.mark.parametrize("kept", [False, True])
def test_two_devices_have_half_each_and_rows_of_padding(device: str, k: int, codec: str, kept: bool) -> None:
    q = table(k, codec)
    whole = q.dequantize(torch.float32)
    for begin, end in ((0, 48), (48, ROWS)):
        embedding, head = (layer_for(begin, end, 48, is_head, device) for is_head in (False, True))
        for layer in (embedding, head):
            load(layer, whole if kept else q)
        own = torch.nn.functional.pad(whole[begin:end], (0, 0, 0, 48 - (end - begin))).to(device)
        ids = torch.tensor([[0, 5, 21], [21, 0, 17]], device=device)
        found = embedding.quant_method.embedding(embedding, ids)
        torch.testing.assert_close(found, own[ids], atol=0, rtol=0)
        x, bias = torch.randn(3, COLS, device=device), torch.randn(48, device=device)
        logits = head.quant_method.apply(head, x, bias)
        torch.testing.assert_close(logits, torch.nn.functional.linear(x, own, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("codec", ["planes", "trellis"])
def test_a_tied_head_shares_the_table(device: str, codec: str) -> None:
    q = table(3, codec)
    embedding, head = (layer_for(0, ROWS, 128, is_head, device) for is_head in (False, True))
    assert head.quant_method.tie_weights(head, embedding) is head
    load(embedding, q)
    head.quant_method.process_weights_after_loading(head)
    assert {id(held) for held in head.parameters()} == {id(held) for held in embedding.parameters()}
    whole = torch.nn.functional.pad(q.dequantize(torch.float32), (0, 0, 0, 128 - ROWS)).to(device)
    ids = torch.tensor([3, 69, 3, 16, 15], device=device)
    assert torch.equal(embedding.quant_method.embedding(embedding, ids), whole[ids])
    x = torch.randn(3, COLS, device=device)
    torch.testing.assert_close(head.quant_method.apply(head, x), x @ whole.T, atol=1e-4, rtol=1e-4)
    held = {name.rpartition("_")[2] for name, tensor in embedding.named_parameters() if tensor.numel()}
    assert held == ({"tiles", "constants"} if device == "cuda" else set(q.parts))  # the table is there once


def test_a_head_tied_to_an_ordinary_embedding_takes_its_method() -> None:
    head, taken = layer_for(0, ROWS, 128, True), []
    method = SimpleNamespace(tie_weights=lambda layer, other: taken.append((layer, other)) or layer)
    embedding = SimpleNamespace(quant_method=method)
    assert head.quant_method.tie_weights(head, embedding) is head
    assert head.quant_method is method and taken == [(head, embedding)] and not list(head.parameters())


def test_the_guard_is_let_go() -> None:
    layer = layer_for(0, ROWS, 128, True)
    held = layer.get_parameter("weight")
    held.weight_loader(held, torch.empty(0))
    load(layer, table())
    assert not hasattr(layer, "weight")
