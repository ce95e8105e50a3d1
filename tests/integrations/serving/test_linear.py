"""A server's linear layer: what arrives tensor by tensor becomes a product, whatever is fused and however it is cut."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import kbitq
from helpers.served_layers import Method
from kbitq.errors import BuildError, FormatError
from kbitq.integrations.serving import matrix, products
from kbitq.integrations.serving.names import StoredNames
from kbitq.quantized import QuantizedTensor

STORED = StoredNames(("planes", "trellis", "trellis/128"))
Weight = QuantizedTensor | torch.Tensor


def weight_loader_v2() -> None:
    """The name by which a layer's loader is known to call the methods of parameters."""


def made(rows: int, cols: int, k: int, codec: str = "planes", seed: int = 0) -> QuantizedTensor:
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return kbitq.quantize(w, k, codec=codec)


def stored(weight: Weight) -> dict[str, torch.Tensor]:
    """The tensors that a file has, by what follows the module's name."""
    if isinstance(weight, torch.Tensor):
        return {"weight": weight}
    return {f"weight_{part}": held for part, held in weight.parts.items()}


def dense(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)


def layer_for(sizes: list[int], cols: int, whole: int | None = None, rank: int = 0, **attrs: Any) -> tuple[Any, Method]:
    layer, method = torch.nn.Module(), Method(STORED, "model.layers.0.qkv_proj")
    loader = attrs.pop("loader", weight_loader_v2)
    device = attrs.pop("device", "cpu")
    with torch.device(device):
        method.create_weights(layer, cols, sizes, whole or cols, sum(sizes), torch.float32, weight_loader=loader)
    for held in layer.parameters():
        held.tp_rank = rank
    return layer, method


def load(layer: Any, weight: Weight, kind: str, **named: Any) -> None:
    for name, tensor in stored(weight).items():
        getattr(layer.get_parameter(name), f"load_{kind}_weight")(tensor, **named)


def finished(layer: Any, method: Method) -> Any:
    method.process_weights_after_loading(layer)
    return layer


def check(layer: Any, method: Method, weights: Iterable[Weight], cols: int, bias: bool = True) -> None:
    whole = torch.cat([dense(w) for w in weights]).to(next(layer.parameters()).device)
    x = torch.randn(5, cols, generator=torch.Generator().manual_seed(9)).to(whole.device)
    b = torch.randn(len(whole)).to(whole.device) if bias else None
    torch.testing.assert_close(method.apply(layer, x, b), torch.nn.functional.linear(x, whole, b), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(method.dequantize_weight(layer), whole)


MIXTURES = {
    "one K": [made(64, 72, 3), made(32, 72, 3, seed=1), made(32, 72, 3, seed=2)],
    "two K": [made(64, 72, 4), made(32, 72, 3, seed=1), made(32, 72, 3, seed=2)],
    "codecs": [made(64, 72, 3), made(32, 72, 3, "trellis", 1), made(32, 72, 2, "trellis/128", 2)],
    "one kept": [made(64, 72, 8), torch.randn(32, 72), made(32, 72, 2, seed=2)],
    "odd rows": [made(37, 72, 4), made(5, 72, 4, seed=1), made(5, 72, 4, seed=2)],
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_q_k_v(mixture: str) -> None:
    weights = MIXTURES[mixture]
    layer, method = layer_for([len(dense(w)) for w in weights], 72)
    for shard, weight in zip("qkv", weights, strict=True):
        load(layer, weight, "qkv", shard_id=shard, num_heads=1)
    check(finished(layer, method), method, weights, 72)
    check(layer, method, weights, 72, bias=False)


def test_what_has_one_coding_is_one_product() -> None:
    pieces = {}
    for name in ("one K", "two K", "odd rows"):
        layer, method = layer_for([len(dense(w)) for w in MIXTURES[name]], 72)
        for shard, weight in zip("qkv", MIXTURES[name], strict=True):
            load(layer, weight, "qkv", shard_id=shard)
        pieces[name] = [piece.rows for piece in finished(layer, method).kbitq_pieces]
    assert pieces == {"one K": [128], "two K": [64, 64], "odd rows": [37, 5, 5]}


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_outputs_over_four_devices_of_which_two_share_k_and_v(rank: int) -> None:
    q, k, v = made(128, 64, 3), made(32, 64, 3, seed=1), made(32, 64, 4, seed=2)
    layer, method = layer_for([32, 16, 16], 64, rank=rank)
    for shard, weight in zip("qkv", (q, k, v), strict=True):
        load(layer, weight, "qkv", shard_id=shard, num_heads=2)
    own = [dense(q).split(32)[rank], *(dense(w).split(16)[rank // 2] for w in (k, v))]
    check(finished(layer, method), method, own, 64)


@pytest.mark.parametrize(("codec", "k", "cols"), [("planes", 5, 192), ("trellis", 2, 192), ("trellis/128", 3, 256)])
@pytest.mark.parametrize("rank", [0, 1])
def test_inputs_over_two_devices(codec: str, k: int, cols: int, rank: int) -> None:
    weight = made(48, cols, k, codec)
    layer, method = layer_for([48], cols // 2, cols, rank)
    load(layer, weight, "row_parallel")
    check(finished(layer, method), method, [dense(weight).split(cols // 2, 1)[rank]], cols // 2)


def test_inputs_of_a_kept_weight() -> None:
    weight = torch.randn(48, 20)
    layer, method = layer_for([48], 10, 20, 1)
    load(layer, weight, "row_parallel")
    check(finished(layer, method), method, [weight[:, 10:]], 10)


@pytest.mark.parametrize(("codec", "cols", "cut"), [("planes", 96, 32), ("trellis/128", 192, 128)])
def test_inputs_that_cannot_be_cut_are_refused_with_the_sentence_of_plan(codec: str, cols: int, cut: int) -> None:
    layer, method = layer_for([48], cols // 2, cols)
    load(layer, made(48, cols, 3, codec), "row_parallel")
    sentence = (
        f"model.layers.0.qkv_proj: its {cols} inputs cannot be split over 2 devices: the codec {codec} cuts a row at "
        f"multiples of {cut} columns, and {cols} / 2 is none"
    )
    with pytest.raises(ValueError, match=sentence):
        method.process_weights_after_loading(layer)


def test_gate_and_up_that_are_fused_in_the_file_and_the_same_on_every_device() -> None:
    def weight_loader() -> None: ...

    both = made(96, 64, 3)
    layer, method = layer_for([64, 32], 64, loader=weight_loader)
    for name, tensor in stored(both).items():
        held = layer.get_parameter(name)
        held.weight_loader(held, tensor)
    check(finished(layer, method), method, [both], 64)


def test_the_guard_is_let_go() -> None:
    weight = made(32, 64, 3)
    layer, method = layer_for([32], 64, loader=lambda *_: pytest.fail("the guard was loaded"))
    guard = layer.get_parameter("weight")
    guard.weight_loader(guard, torch.empty(0))
    load(layer, weight, "column_parallel")
    check(finished(layer, method), method, [weight], 64)
    assert not hasattr(layer, "weight")  # by which LoRA and others would know an ordinary layer
    assert layer.get_parameter("weight_packed").numel() == 0


def test_a_part_that_is_missing_is_an_error_that_names_the_layer() -> None:
    layer, method = layer_for([32], 64)
    for name, tensor in list(stored(made(32, 64, 3)).items())[:2]:
        layer.get_parameter(name).load_column_parallel_weight(tensor)
    with pytest.raises(FormatError, match=r"^model\.layers\.0\.qkv_proj: parts of shapes"):
        method.process_weights_after_loading(layer)
    with pytest.raises(FormatError, match="the files have no weight of this layer"):
        finished(*layer_for([32], 64))


def test_what_a_loader_gives_is_copied() -> None:
    """Some loaders reuse the memory."""
    weight = made(32, 64, 3)
    wanted = dense(weight).clone()
    layer, method = layer_for([32], 64)
    load(layer, weight, "column_parallel")
    for held in weight.parts.values():
        held.zero_()
    check(finished(layer, method), method, [wanted], 64)


def test_a_product_compiles_whole() -> None:
    weights = MIXTURES["codecs"]
    layer, method = layer_for([len(dense(w)) for w in weights], 72)
    for shard, weight in zip("qkv", weights, strict=True):
        load(layer, weight, "qkv", shard_id=shard)
    finished(layer, method)
    x, bias = torch.randn(5, 72), torch.randn(128)
    compiled = torch.compile(lambda x: method.apply(layer, x, bias), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), method.apply(layer, x, bias))


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("mixture", list(MIXTURES))
def test_on_a_gpu_only_tiles_stay(mixture: str, cuda_device: str) -> None:
    weights = MIXTURES[mixture]
    layer, method = layer_for([len(dense(w)) for w in weights], 72, device=cuda_device)
    for shard, weight in zip("qkv", weights, strict=True):
        load(layer, weight, "qkv", shard_id=shard)
    check(finished(layer, method), method, weights, 72)
    if mixture in ("one K", "two K", "codecs"):
        assert all(isinstance(piece, products.TiledPiece) for piece in layer.kbitq_pieces)
        assert not any(name.endswith("_packed") and held.numel() for name, held in layer.named_parameters())


@pytest.mark.cuda
@pytest.mark.parametrize("mixture", ["one K", "two K", "codecs", "one kept"])
@pytest.mark.parametrize("rows", [1, 48])
def test_a_graph_records_a_product(mixture: str, rows: int, cuda_device: str) -> None:
    weights = MIXTURES[mixture]
    layer, method = layer_for([len(dense(w)) for w in weights], 72, device=cuda_device)
    for shard, weight in zip("qkv", weights, strict=True):
        load(layer, weight, "qkv", shard_id=shard)
    for part in finished(layer, method).parameters():
        if part.dtype == torch.float32 and part.shape[-1:] == (72,):
            part.data = part.data.bfloat16()
    x = torch.randn(rows, 72, device=cuda_device, dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        method.apply(layer, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = method.apply(layer, x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, method.apply(layer, x))


def test_a_gpu_that_this_build_has_no_code_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded: vLLM makes the layers first."""
    monkeypatch.setattr("kbitq.ops.cuda_missing", lambda: "kbitq was built without CUDA")
    matrix.check_device(torch.device("cpu"))
    with pytest.raises(BuildError, match="the server computes on a GPU, which this kbitq cannot: kbitq was built with"):
        matrix.check_device(torch.device("cuda", 0))
    asked: list[torch.device] = []
    monkeypatch.setattr(matrix, "check_device", asked.append)
    layer_for([16], 32)
    assert len(asked) == len(STORED.arriving())
