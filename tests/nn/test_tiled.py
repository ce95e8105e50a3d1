"""Layers that hold tiles in place of planes: to every asker the planes are there, bit for bit.

On a CPU the tiles are put in by hand; on a GPU the first product does it.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import kbitq
from kbitq.nn import KbitEmbedding, KbitLinear, replace_linears, share_weight, tile_weights
from kbitq.nn.packed import PackedMatrix
from kbitq.ops import tiled_linear, tiles

CODINGS = [("planes", 3, {}), ("trellis", 2, {}), ("trellis", 1, {"scale_block": 128})]
PARTS = ["weight_packed", "weight_absmax", "weight_codebook"]


def coded(rows: int = 40, cols: int = 300, codec: str = "planes", k: int = 3, **options: int) -> kbitq.QuantizedTensor:
    draw = torch.Generator().manual_seed(rows + k)
    return kbitq.quantize(torch.randn(rows, cols, generator=draw), k, codec=codec, **options)


def by_tiles(layer: PackedMatrix) -> PackedMatrix:
    """As after a product on a GPU."""
    parts = layer.parts
    made = tiles.tile(parts["packed"], parts["absmax"], parts["codebook"], layer.shape[1], layer.info.codec)
    layer.hold("weight", made)
    return layer


@pytest.fixture(params=CODINGS, ids=lambda c: f"{c[0]}-{c[1]}-{c[2].get('scale_block', 32)}")
def linear(request: pytest.FixtureRequest) -> KbitLinear:
    codec, k, options = request.param
    bias = nn.Parameter(torch.linspace(-1, 1, 40))
    return KbitLinear.from_quantized(coded(codec=codec, k=k, **options), bias)


def test_the_planes_are_let_go(linear: KbitLinear) -> None:
    names = set(dict(by_tiles(linear).named_parameters()))
    assert names == {"weight_tiles", "weight_levels", "weight_codebook", "bias"}


def test_every_asker_gets_the_planes(linear: KbitLinear) -> None:
    want = {name: value.clone() for name, value in linear.state_dict().items()}
    dense = linear.dequantize()
    by_tiles(linear)
    state = linear.state_dict()
    assert list(state) == list(want)
    assert all(torch.equal(state[name], value) for name, value in want.items())
    assert all(torch.equal(getattr(linear, name), want[name]) for name in PARTS)
    assert torch.equal(linear.get_parameter("weight_packed"), want["weight_packed"])
    assert torch.equal(linear.dequantize(), dense)
    assert torch.equal(linear.dequantize(torch.float64), dense.double())
    assert torch.equal(linear.quantized().dequantize(), dense)
    assert "weight_tiles" in dict(linear.named_parameters()), "asking changed what is held"
    with pytest.raises(AttributeError, match="weight_scale"):
        _ = linear.weight_scale


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda m: torch.load(pickled(m), weights_only=False)])
def test_copies_hold_planes(linear: KbitLinear, way: Callable[[nn.Module], nn.Module]) -> None:
    want = linear.dequantize()
    made = way(by_tiles(linear))
    assert set(PARTS) < set(dict(made.named_parameters()))
    assert torch.equal(made.dequantize(), want)
    assert torch.equal(made(torch.ones(1, 300)), linear(torch.ones(1, 300)))


def pickled(module: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("assign", [False, True])
def test_other_weights_are_loaded_into_it(linear: KbitLinear, assign: bool) -> None:
    other = copy.deepcopy(linear)
    other.weight_packed.data.bitwise_not_()
    by_tiles(linear).load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(linear.dequantize(), other.dequantize())


def test_casts_keep_tiles_and_moves_do_not(linear: KbitLinear) -> None:
    want = by_tiles(linear).dequantize()
    assert linear.to(torch.bfloat16).dtype == torch.bfloat16
    assert linear.weight_tiles.dtype == torch.int32
    assert linear.weight_levels.dtype == torch.float32
    assert torch.equal(linear.dequantize(), want.bfloat16())
    assert set(PARTS) < set(dict(linear.to("meta").named_parameters()))


def test_a_part_that_is_set_takes_its_place(linear: KbitLinear) -> None:
    packed = by_tiles(linear).weight_packed.clone()
    linear.weight_packed = nn.Parameter(packed.bitwise_not(), requires_grad=False)
    assert [name for name, _ in linear.named_parameters()] == [*PARTS, "bias"]
    assert torch.equal(linear.weight_packed, packed.bitwise_not())


def test_another_weight_is_held(linear: KbitLinear) -> None:
    before = by_tiles(linear).dequantize()
    linear.requantize(-before)
    assert (linear.dequantize() * before).sum() < -0.5 * before.square().sum()


def test_products_and_gradients(linear: KbitLinear) -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    grads, outs = [], []
    for layer in (linear, by_tiles(copy.deepcopy(linear))):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.square().sum().backward()
        grads.append((leaf.grad, layer.bias.grad))
        outs.append(y.detach())
    assert torch.equal(*outs)
    assert torch.allclose(grads[0][0], grads[1][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(grads[0][1], grads[1][1])


def test_gradients_of_gradients(linear: KbitLinear) -> None:
    by_tiles(linear)
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (slope,) = torch.autograd.grad(linear(x).pow(3).sum(), x, create_graph=True)
    slope.sum().backward()
    dense = linear.dequantize()
    again = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad((again @ dense.T + linear.bias).pow(3).sum(), again, create_graph=True)
    slope.sum().backward()
    assert torch.allclose(x.grad, again.grad, rtol=1e-3, atol=1e-2)


def tied() -> nn.Sequential:
    table = KbitEmbedding.from_quantized(coded(100, 96))
    head = KbitLinear.from_quantized(coded(100, 96))
    share_weight(table, head)
    return nn.Sequential(table, head)


def hold_tied(model: nn.Sequential) -> None:
    by_tiles(model[1])
    model[0].hold("weight", model[1].tiles_of("weight"))


def test_a_table_that_a_layer_is_tied_to() -> None:
    model, ids = tied(), torch.tensor([[0, 99, 17], [16, 15, 99]])
    want = model[0](ids)
    hold_tied(model)
    assert torch.equal(model[0](ids), want)
    assert model[0](ids[:, :0]).shape == (2, 0, 96)
    assert model[0].weight_tiles is model[1].weight_tiles
    assert len(list(model.parameters())) == 3


@pytest.mark.parametrize("way", ["state", "deepcopy", "untile"])
def test_ties_stay(way: str) -> None:
    model = tied()
    hold_tied(model)
    if way == "state":
        state = model.state_dict()
        assert state["0.weight_packed"].data_ptr() == state["1.weight_packed"].data_ptr()
        return
    made = copy.deepcopy(model) if way == "deepcopy" else model
    for layer in made:
        layer.untile()
    assert made[0].weight_packed is made[1].weight_packed


def test_dequantized_layers_stay_tied() -> None:
    model = tied()
    hold_tied(model)
    kbitq.nn.dequantize_modules(model)
    assert model[0].weight is model[1].weight


@pytest.mark.parametrize("rows", [1, 16, 33])
def test_lookups_are_rows_of_the_weight(rows: int) -> None:
    q = coded(rows, 70)
    made = tiles.tile(*q.parts.values(), 70)
    chosen = torch.arange(rows - 1, -1, -1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(tiled_linear.lookup(chosen, made, dtype), q.dequantize(dtype)[chosen])
        assert torch.equal(tiled_linear.dequantize(made, dtype), q.dequantize(dtype))


def test_compiled_over_tiles(linear: KbitLinear) -> None:
    by_tiles(linear)
    compiled = torch.compile(lambda x: linear(x * 2) + 1, fullgraph=True, backend="aot_eager")
    x = torch.ones(2, 300)
    assert torch.equal(compiled(x), linear(x * 2) + 1)


def test_nothing_is_tiled_on_a_cpu(linear: KbitLinear) -> None:
    linear(torch.ones(2, 300, dtype=torch.bfloat16))
    tile_weights(linear)
    assert set(PARTS) < set(dict(linear.named_parameters()))


@pytest.mark.cuda
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def _gpu(self, cuda_device: str) -> None:
        """All of these need a GPU."""

    def test_one_copy_after_the_first_product(self, linear: KbitLinear, cuda_device: str) -> None:
        want = linear.state_dict()
        linear.to(cuda_device)
        x = torch.randn(3, 300, device=cuda_device, dtype=torch.bfloat16)
        dense = linear.dequantize(torch.bfloat16)
        y = linear(x)
        assert "weight_tiles" in dict(linear.named_parameters())
        bias = linear.bias.to(torch.bfloat16)
        assert torch.allclose(y, nn.functional.linear(x, dense, bias), rtol=2e-2, atol=0.5)
        assert torch.equal(linear.dequantize(torch.bfloat16), dense)
        state = linear.cpu().state_dict()
        assert all(torch.equal(state[name], value) for name, value in want.items())

    def test_memory_of_a_model(self, cuda_device: str) -> None:
        """Tiles take the planes' room, not as much again."""
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).to(torch.bfloat16)
        replace_linears(model, 4, exclude=[], codec="trellis")
        model.to(cuda_device)
        x = torch.ones(1, 4096, device=cuda_device, dtype=torch.bfloat16)
        with torch.no_grad():
            model(x)
        torch.cuda.synchronize()
        before, bits = torch.cuda.memory_allocated(), 4 * 4096 * 4096 * 4.25 / 8
        model(x)
        held = sum(p.nbytes for p in model.parameters())
        assert held < bits * 1.01
        assert before < bits * 1.05 + (1 << 27)  # the kernels' workspace, which all layers share

    def test_training_over_tiles(self, linear: KbitLinear, cuda_device: str) -> None:
        linear.to(cuda_device)
        x = torch.randn(5, 300, device=cuda_device, dtype=torch.bfloat16)
        linear(x)
        leaf = x.clone().requires_grad_()
        linear(leaf).sum().backward()
        want = linear.dequantize(torch.float32).sum(0).expand(5, -1)
        assert torch.allclose(leaf.grad.float(), want, rtol=2e-2, atol=0.2)

    def test_tied_tables(self, cuda_device: str) -> None:
        model, ids = tied().to(cuda_device).to(torch.bfloat16), torch.tensor([0, 99, 17], device=cuda_device)
        want = model[0](ids)
        for _ in range(2):
            model[1](model[0](ids))
        assert model[0].weight_tiles is model[1].weight_tiles
        assert torch.equal(model[0](ids), want)

    def test_compiled_in_graphs(self, linear: KbitLinear, cuda_device: str) -> None:
        linear.to(cuda_device).to(torch.bfloat16)
        tile_weights(linear)
        compiled = torch.compile(linear, fullgraph=True, mode="reduce-overhead")
        x = torch.randn(2, 300, device=cuda_device, dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(compiled(x).clone(), linear(x))

    def test_offloaded_layers_keep_planes(self, linear: KbitLinear, cuda_device: str) -> None:
        accelerate = pytest.importorskip("accelerate")
        accelerate.cpu_offload(linear, execution_device=torch.device(cuda_device))
        x = torch.randn(2, 300, dtype=torch.bfloat16)
        first = linear(x)
        assert torch.equal(linear(x), first)
        assert set(PARTS) < set(dict(linear.named_parameters()))
