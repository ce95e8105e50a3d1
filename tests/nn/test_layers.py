"""KbitLinear and KbitEmbedding: what they compute, their state, and what moves, casts and copies leave whole."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import kbitq
from helpers.layered_model import IDS, Model
from helpers.tolerances import LINEAR, LOGITS, relative_error
from kbitq.nn import KbitEmbedding, KbitLinear, dequantize_modules, replace_linears

CASTS = {
    "half": (lambda m: m.half(), torch.float16),
    "to": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "type": (lambda m: m.type(torch.float16), torch.float16),
    "double": (lambda m: m.double(), torch.float64),
    "float": (lambda m: m.half().float(), torch.float32),
}


def layers() -> list[tuple[str, KbitLinear | KbitEmbedding]]:
    torch.manual_seed(0)
    return [
        ("linear", KbitLinear.from_linear(nn.Linear(70, 48), 3)),
        ("embedding", KbitEmbedding.from_embedding(nn.Embedding(50, 70), 4)),
    ]


@pytest.mark.parametrize("k", range(2, 9))
@pytest.mark.parametrize("bias", [True, False])
def test_linear_computes_with_the_decoded_weight(k: int, bias: bool, device: str) -> None:
    dense = nn.Linear(70, 48, bias=bias)
    offset = dense.bias.detach().clone() if bias else None  # the layers share the bias, and one of them moves
    packed = KbitLinear.from_linear(dense, k, scale="absmax", codebook="nf").to(device)
    q = kbitq.quantize(dense.weight, k, scale="absmax", codebook="nf")
    assert torch.equal(packed.dequantize().cpu(), q.dequantize())
    assert torch.equal(packed.weight.cpu(), q.dequantize())
    for shape in ((70,), (3, 70), (2, 7, 70)):
        x = torch.randn(*shape)
        y = nn.functional.linear(x, q.dequantize(), offset)
        assert relative_error(packed(x.to(device)), y) < 2 * LINEAR[torch.float32]


def test_linear_of_several_codebooks(device: str) -> None:
    parts = [kbitq.quantize(torch.randn(16, 70) * 2**i, 3) for i in range(3)]
    fused = KbitLinear(70, 48, 3, bias=False, device=device)
    fused.weight_codebook = nn.Parameter(torch.stack([q.codebook for q in parts]).to(device), requires_grad=False)
    fused.weight_packed.data = torch.cat([q.packed for q in parts]).to(device)
    fused.weight_absmax.data = torch.cat([q.absmax for q in parts]).to(device)
    dense = torch.cat([q.dequantize() for q in parts])
    assert torch.equal(fused.dequantize().cpu(), dense)
    x = torch.randn(5, 70)
    assert relative_error(fused(x.to(device)), x @ dense.T) < 2 * LINEAR[torch.float32]
    assert "codebooks=3" in repr(fused)


def test_embedding_looks_up_decoded_rows(device: str) -> None:
    dense = nn.Embedding(50, 70, padding_idx=2)
    packed = KbitEmbedding.from_embedding(dense, 4).to(device)
    table = kbitq.quantize(dense.weight, 4).dequantize()
    ids = torch.tensor([[0, 2, 49], [7, 7, 1]])
    assert torch.equal(packed(ids.to(device)).cpu(), table[ids])
    assert packed.padding_idx == 2
    half = packed.half()(ids.to(device))
    assert half.dtype == torch.float16
    assert torch.equal(half.cpu(), table.half()[ids])


def test_an_embedding_that_renormalises_is_refused() -> None:
    with pytest.raises(ValueError, match="max_norm"):
        KbitEmbedding.from_embedding(nn.Embedding(50, 70, max_norm=1.0), 4)


def test_features_that_share_the_last_block_are_still_told_apart() -> None:
    layer = KbitLinear.from_linear(nn.Linear(70, 48), 3)
    for wrong in (65, 71, 96):
        with pytest.raises(ValueError, match=f"{wrong} features, needs 70"):
            layer(torch.randn(2, wrong))


@pytest.mark.parametrize("name, layer", layers(), ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_the_packed_weight_alone(name: str, layer: KbitLinear | KbitEmbedding, cast: str) -> None:
    layer = copy.deepcopy(layer)
    before = {n: p.clone() for n, p in layer.named_parameters() if n.startswith("weight_")}
    apply, dtype = CASTS[cast]
    assert apply(layer) is layer
    after = dict(layer.named_parameters())
    for part, tensor in before.items():
        assert after[part].dtype == tensor.dtype
        assert torch.equal(after[part], tensor)
    assert layer.dtype == dtype
    assert layer.dequantize().dtype == dtype
    if isinstance(layer, KbitLinear):
        assert layer.bias.dtype == dtype


@pytest.mark.parametrize("name, layer", layers(), ids=lambda v: v if isinstance(v, str) else "")
def test_copies_and_pickles_are_whole(name: str, layer: KbitLinear | KbitEmbedding) -> None:
    x = torch.randn(3, 70) if name == "linear" else torch.arange(9)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        assert copied.weight_packed.data_ptr() != layer.weight_packed.data_ptr()
        assert torch.equal(copied(x), layer(x))
        assert copied.info == layer.info
        assert not copied.weight_codebook.requires_grad


@pytest.mark.parametrize("name, layer", layers(), ids=lambda v: v if isinstance(v, str) else "")
def test_state_dict_has_the_names_of_the_file(name: str, layer: KbitLinear | KbitEmbedding) -> None:
    state = layer.state_dict()
    assert {n for n in state if n != "bias"} == {"weight_packed", "weight_absmax", "weight_codebook"}
    blank = copy.deepcopy(layer).to_empty(device="cpu")
    blank.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(blank.state_dict().values(), state.values(), strict=True))


def test_meta_then_load(tmp_path) -> None:
    layer = KbitLinear.from_linear(nn.Linear(70, 48), 5)
    made = KbitLinear(70, 48, 5, device="meta")
    made.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(4, 70)
    assert torch.equal(made(x), layer(x))
    assert not made.weight_packed.requires_grad


def test_repr_says_what_it_is() -> None:
    assert repr(KbitLinear(70, 48, 3)) == "KbitLinear(in_features=70, out_features=48, k=3, bias=True)"
    assert repr(KbitEmbedding(50, 70, 4, padding_idx=1)) == "KbitEmbedding(50, 70, k=4, padding_idx=1)"


def test_parameters_take_the_bytes_of_the_format() -> None:
    layer = KbitLinear(4096, 256, 3, bias=False)
    nbytes = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert nbytes == 256 * 4096 * 3.25 / 8 + 8 * 4
    assert not any(p.requires_grad for p in layer.parameters())


# -- a whole model -----------------------------------------------------------------------------------------------------


def test_a_model_in_memory_is_replaced_and_put_back() -> None:
    model = Model().eval()
    original = copy.deepcopy(model)
    reasons = replace_linears(model, 8, include=["lm_head.weight"], keep_embeddings=False)
    assert isinstance(model.up, KbitLinear)
    assert isinstance(model.embed, KbitEmbedding)
    assert isinstance(model.norm, nn.LayerNorm)
    assert type(model.experts).__name__ == "KbitExperts"
    assert reasons["up.weight"] == "quantized: matrix"
    assert reasons["out.weight"].startswith("kept: fewer than 4,096")
    y = model(IDS)
    assert relative_error(y, original(IDS)) < 0.02  # 8 bits
    assert dequantize_modules(model) == 5
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert relative_error(model(IDS), y) < LOGITS[torch.float32]


def test_tied_weights_stay_one() -> None:
    model = Model()
    replace_linears(model, 4, include=["lm_head.weight"], keep_embeddings=False)
    assert model.embed.weight_packed is model.lm_head.weight_packed
    assert model.embed.weight_codebook is model.lm_head.weight_codebook
    dequantize_modules(model)
    assert model.embed.weight is model.lm_head.weight


def test_the_selection_is_that_of_the_command_line() -> None:
    model = Model()
    reasons = replace_linears(model, 3, exclude=["down.weight"])
    assert reasons["embed.weight"] == "kept: embedding"
    assert reasons["lm_head.weight"] == "kept: output head"
    assert reasons["down.weight"] == "kept: excluded by 'down.weight'"
    assert reasons["experts.down_proj"] == "quantized: fused experts"
    assert type(model.down) is nn.Linear
    assert type(model.embed) is nn.Embedding


def test_patterns_and_empty_selections_are_errors() -> None:
    with pytest.raises(kbitq.KbitqError, match="no_such_layer"):
        replace_linears(Model(), 3, exclude=["no_such_layer"])
    with pytest.raises(kbitq.KbitqError, match="nothing to replace: the model has no linear layer"):
        replace_linears(nn.Sequential(nn.LayerNorm(4)), 3)
    with pytest.raises(kbitq.KbitqError, match=r"no tensor would be quantized; kept: fewer than 4,096 elements"):
        replace_linears(nn.Sequential(nn.Linear(4, 4)), 3)


def test_subclasses_are_left_alone() -> None:
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.weight.sum()

    model = nn.Sequential(Odd(96, 96), nn.Linear(96, 96))
    replace_linears(model, 3)
    assert type(model[0]) is Odd
    assert type(model[1]) is KbitLinear


def test_compile_and_export_of_layers(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 72), nn.Linear(72, 100), nn.GELU(), nn.Linear(100, 64))
    replace_linears(model, 4, keep_embeddings=False)
    model.to(device)
    ids = IDS.to(device)
    y = model(ids)
    assert relative_error(torch.compile(model, fullgraph=True)(ids), y) < LOGITS[torch.float32]
    exported = torch.export.export(model, (ids,))
    assert relative_error(exported.module()(ids), y) < LOGITS[torch.float32]
