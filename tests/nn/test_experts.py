"""Fused experts that stay packed under a model's own forward."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import kbitq
from helpers.layered_model import Experts
from helpers.tolerances import LINEAR, LOGITS, relative_error
from kbitq import ops
from kbitq.nn import ExpertStack, KbitExperts, dequantize_modules, experts, pack_experts, replace_linears
from kbitq.ops import tiled_linear
from kbitq.ops.tiles import Tiles


def packed_experts(k: int = 4) -> tuple[nn.Module, nn.Module]:
    """A model with packed experts, and the same with the decoded stacks in dense parameters."""
    model = nn.ModuleDict({"experts": Experts(hidden=72, inner=40)})
    replace_linears(model, k)
    dense = copy.deepcopy(model)
    dequantize_modules(dense)
    return model["experts"], dense["experts"]


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_forward_is_that_of_the_decoded_stacks(k: int, device: str) -> None:
    packed, dense = (m.to(device) for m in packed_experts(k))
    assert isinstance(packed, KbitExperts)
    assert type(dense) is Experts
    for m in (1, 30):
        x = torch.randn(m, 72, device=device)
        assert relative_error(packed(x), dense(x)) < LOGITS[torch.float32]


def test_state_dict_has_the_names_of_the_file() -> None:
    packed, _ = packed_experts()
    assert list(packed.state_dict()) == [
        f"{stack}_{part}" for stack in ("gate_up_proj", "down_proj") for part in ("packed", "absmax", "codebook")
    ]
    assert packed.gate_up_proj_packed.shape == (3, 80, 3 * 4)
    assert packed.gate_up_proj_absmax.shape == (3, 80, 3)


def test_a_codebook_for_each_expert_and_part() -> None:
    module = Experts(experts=2, hidden=64, inner=16)
    quantized = [[kbitq.quantize(torch.randn(16, 64) * 4 ** (2 * e + p), 3) for p in range(2)] for e in range(2)]
    down = kbitq.quantize(torch.randn(2, 64, 16), 3, name="experts.down_proj")
    pack_experts(module, {"gate_up_proj": (3, 2), "down_proj": (3, 0)})
    for part in ("packed", "absmax"):
        stacked = torch.stack([torch.cat([getattr(q, part) for q in row]) for row in quantized])
        getattr(module, f"gate_up_proj_{part}").data = stacked
        getattr(module, f"down_proj_{part}").data = getattr(down, part)
    module.gate_up_proj_codebook.data = torch.stack([torch.stack([q.codebook for q in row]) for row in quantized])
    module.down_proj_codebook.data = down.codebook
    dense = torch.stack([torch.cat([q.dequantize() for q in row]) for row in quantized])
    assert torch.equal(module.gate_up_proj.dense(), dense)
    x = torch.randn(5, 64)
    assert relative_error(nn.functional.linear(x, module.gate_up_proj[1]), x @ dense[1].T) < 2 * LINEAR[torch.float32]
    module.unpack()
    assert torch.equal(module.gate_up_proj, dense)
    assert torch.equal(module.down_proj, down.dequantize())


def test_other_uses_of_a_stack_see_the_decoded_values() -> None:
    packed, dense = packed_experts()
    stack, whole = packed.gate_up_proj, dense.gate_up_proj.detach()
    assert isinstance(stack, ExpertStack)
    assert stack.shape == whole.shape
    assert (stack.dtype, stack.device, len(stack)) == (whole.dtype, whole.device, 3)
    x = torch.randn(3, 5, 72)
    assert torch.equal(torch.bmm(x, stack.transpose(1, 2)), torch.bmm(x, whole.transpose(1, 2)))
    assert torch.equal(x[0] @ stack[2].T, x[0] @ whole[2].T)
    assert torch.equal(torch.matmul(x[0], stack[-1].t()), x[0] @ whole[2].T)
    assert torch.equal(stack[torch.tensor([2, 0])], whole[[2, 0]])
    assert torch.equal(stack.sum(), whole.sum())


def test_gradients_reach_the_input() -> None:
    packed, dense = packed_experts()
    x = torch.randn(4, 72, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    packed(x).square().sum().backward()
    dense(y).square().sum().backward()
    assert relative_error(x.grad, y.grad) < LOGITS[torch.float32]


def test_casts_copies_and_pickles() -> None:
    packed, _ = packed_experts()
    x = torch.randn(4, 72)
    for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(copied(x), packed(x))
        assert type(copied) is type(packed)
    half = copy.deepcopy(packed).half()
    assert half.gate_up_proj_codebook.dtype == torch.float32
    assert half.gate_up_proj.dtype == torch.float16
    assert half(x.half()).dtype == torch.float16
    assert "gate_up_proj=[3, 80, 72]" in repr(packed)
    assert "k=4" in repr(packed)


def test_a_missing_attribute_is_still_missing() -> None:
    packed, _ = packed_experts()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = packed.no_such_thing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_matrices_of_a_stack(parts: int, dtype: torch.dtype, device: str) -> None:
    """Every expert of a stack times x, for few and many rows; also where kernels keep an order of their own."""
    rows, cols, experts = 64, 300, 3
    draw = torch.Generator().manual_seed(2)
    quantized = [
        [kbitq.quantize(torch.randn(rows // max(parts, 1), cols, generator=draw), 3) for _ in range(max(parts, 1))]
        for _ in range(experts)
    ]
    if parts == 0:  # one codebook for all
        stack = torch.stack([row[0].dequantize() for row in quantized])
        q = kbitq.quantize(stack, 3, name="experts.up")
        packed, absmax, codebook, dense = q.packed, q.absmax, q.codebook, q.dequantize()
    else:
        packed = torch.stack([torch.cat([q.packed for q in row]) for row in quantized])
        absmax = torch.stack([torch.cat([q.absmax for q in row]) for row in quantized])
        codebook = torch.stack([torch.stack([q.codebook for q in row]) for row in quantized])
        dense = torch.stack([torch.cat([q.dequantize() for q in row]) for row in quantized])
    parts = {"packed": packed.to(device), "absmax": absmax.to(device), "codebook": codebook.to(device)}
    held = ExpertStack("planes", parts, (experts, rows, cols), dtype)
    assert torch.equal(held.dense().cpu(), dense.to(dtype))
    for expert in (0, 1, 2, -1):
        for m in (1, 9, 200):
            x = torch.randn(m, cols, generator=draw).to(dtype)
            y = nn.functional.linear(x.to(device), held[expert])
            assert y.dtype == dtype
            assert relative_error(y, x.double() @ dense[expert].double().T) < 2 * LINEAR[dtype]
            again = x.to(device).requires_grad_()
            nn.functional.linear(again, held[expert]).sum().backward()
            assert relative_error(again.grad, dense[expert].double().sum(0).expand(m, -1)) < 2 * LINEAR[dtype]


def transformers_experts(k: int) -> nn.Module:
    """A packed module of transformers' own class: six experts, two for each token, in bfloat16."""
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=96, num_experts=6, num_experts_per_tok=2)
    draw = torch.Generator().manual_seed(k)
    module = modeling.Qwen3MoeExperts(config)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.05
    model = nn.ModuleDict({"experts": module}).to(torch.bfloat16)
    replace_linears(model, k)
    return model["experts"]


def routed(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, the experts chosen for each token (never the fifth), and their weights."""
    draw = torch.Generator().manual_seed(tokens)
    x, scores = torch.randn(tokens, 256, generator=draw), torch.rand(tokens, 6, generator=draw)
    scores[:, 4] = 0
    weights, chosen = scores.topk(2, dim=-1)
    return x.to(device, torch.bfloat16), chosen.to(device), weights.to(device, torch.bfloat16)


def one_by_one(packed: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """The model's own loop."""
    return packed._dense_class.forward.__wrapped__(packed, *args)


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_grouped_experts_are_those_of_the_models_loop(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sorting and the adding up, with a plain product in place of the kernel."""
    packed, args = transformers_experts(4), routed(tokens, "cpu")
    assert packed._grouped_stacks(*args[:2]) is None  # on the CPU

    def product(x: torch.Tensor, weight: Tiles, offsets: torch.Tensor) -> torch.Tensor:
        assert offsets.dtype == torch.int32
        bounds = offsets.tolist()
        assert len(weight.codebook) == len(bounds) - 1 == 6
        assert (bounds[0], bounds[-1]) == (0, len(x))
        words, scales = (t.chunk(6) for t in weight.planes())
        parts = [
            x[a:b] @ ops.dequantize(words[e], scales[e], weight.codebook[e], weight.cols, x.dtype).T
            for e, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        return torch.cat(parts)

    monkeypatch.setattr(tiled_linear, "grouped_linear", product)
    stacks = (packed.gate_up_proj, packed.down_proj)
    tiles = [tiled_linear.tile(*s.weight.values(), s.shape[2]) for s in stacks]
    with torch.no_grad():
        y = experts._grouped(packed, *args, *tiles)
        assert y.dtype == torch.bfloat16
        assert relative_error(y, one_by_one(packed, *args).double()) < 2 * LINEAR[torch.bfloat16]


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("k", [3, 6])
def test_all_experts_in_one_launch(cuda_device: str, tokens: int, k: int) -> None:
    """On a GPU: grouped, as one matrix at a time, and, with K up to 5, in a graph."""
    packed, args = transformers_experts(k).to(cuda_device), routed(tokens, cuda_device)
    assert (packed._grouped_stacks(*args[:2]) is not None) == (k <= 5)
    with torch.no_grad():
        y = packed(*args)
        assert y.dtype == torch.bfloat16
        assert relative_error(y, one_by_one(packed, *args).double()) < 2 * LINEAR[torch.bfloat16]
    if k <= 5:
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            again = packed(*args)
        graph.replay()
        assert torch.equal(again, y)
