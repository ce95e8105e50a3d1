"""A server's experts: however they are stored and coded, tokens get what the chosen ones give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kbitq
from kbitq.errors import FormatError
from kbitq.integrations.serving.experts import ArrivingExperts, PackedExperts, keep
from kbitq.quantized import QuantizedTensor

COUNT, HIDDEN, INNER = 4, 48, 64
CODECS = ("planes", "trellis")
SHARDS = ("w1", "w3", "w2")
Choice = Callable[[int, str], tuple[int, str]]


def weights(choice: Choice) -> dict[tuple[str, int], QuantizedTensor]:
    made = {}
    for e in range(COUNT):
        for i, shard in enumerate(SHARDS):
            shape = (HIDDEN, INNER) if shard == "w2" else (INNER, HIDDEN)
            w = torch.randn(shape, generator=torch.Generator().manual_seed(10 * e + i))
            k, codec = choice(e, shard)
            made[shard, e] = kbitq.quantize(w, k, codec=codec)
    return made


CHOICES: dict[str, Choice] = {
    "one coding": lambda e, shard: (3, "planes"),
    "gate and up differ": lambda e, shard: ({"w1": 2, "w3": 4, "w2": 3}[shard], "planes"),
    "experts differ": lambda e, shard: (4 if e in (1, 2) else 2, "trellis" if e == 1 else "planes"),
}


def arrived(made: dict[tuple[str, int], QuantizedTensor], device: str, rank: int = 0, parts: int = 1) -> Any:
    arriving = ArrivingExperts("layer", COUNT, HIDDEN, INNER // parts, parts, CODECS)
    for (shard, e), q in made.items():
        for part, held in q.parts.items():
            assert arriving.take(part, shard, (e, e), held, rank, torch.device(device))
    return arriving


def silu_and_mul(hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def expected(made: Any, x: Any, factors: Any, chosen: Any, on_input: bool = False, cut: slice = slice(None)) -> Any:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, (ids, own) in enumerate(zip(chosen.tolist(), factors, strict=True)):
        for e, factor in zip(ids, own, strict=True):
            if e >= 0:
                w = {s: made[s, e].dequantize(torch.float32).to(x.device) for s in SHARDS}
                row = x[token].float() * (factor if on_input else 1)
                both = torch.cat([w["w1"][cut] @ row, w["w3"][cut] @ row])
                out[token] += (w["w2"][:, cut] @ silu_and_mul(both)) * (1 if on_input else factor)
    return out


def inputs(device: str, tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    chosen = torch.stack([torch.randperm(COUNT, generator=generator)[:2] for _ in range(tokens)])
    return x.to(device), torch.rand(tokens, 2, generator=generator).to(device), chosen.to(device)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("on_input", [False, True])
def test_the_chosen_experts(device: str, choice: str, on_input: bool) -> None:
    made = weights(CHOICES[choice])
    experts = PackedExperts(arrived(made, device).finished(torch.float32), silu_and_mul, on_input)
    assert len(experts.first) == (1 if choice == "one coding" else 2)
    x, factors, chosen = inputs(device)
    wanted = expected(made, x, factors, chosen, on_input)
    torch.testing.assert_close(experts(x, factors, chosen), wanted, atol=1e-3, rtol=1e-4)
    chosen[:, 1] = -1  # experts of another device
    wanted = expected(made, x, factors, chosen, on_input)
    torch.testing.assert_close(experts(x, factors, chosen), wanted, atol=1e-3, rtol=1e-4)
    keep("layer", experts)
    torch.testing.assert_close(torch.ops.kbitq.experts(x, factors, chosen, "layer"), wanted, atol=1e-3, rtol=1e-4)


def test_a_stack_has_one_constant_which_servers_count_as_the_first_or_second_expert_s() -> None:
    first = kbitq.quantize(torch.randn(COUNT, 2 * INNER, HIDDEN), 3, name="experts.gate_up_proj")
    second = kbitq.quantize(torch.randn(COUNT, HIDDEN, INNER), 4, name="experts.down_proj")
    arriving, cpu = ArrivingExperts("layer", COUNT, HIDDEN, INNER, 1, CODECS), torch.device("cpu")
    *parts, constant = first.parts
    for counted, (shard, q) in enumerate((("w1", first), ("w3", first), ("w2", second))):
        arriving.take(constant, shard, (counted % 2, counted % 2), q.parts[constant], 0, cpu)
        for part in parts:
            stack = q.parts[part] if shard == "w2" else q.parts[part].chunk(2, 1)[counted]
            for e, held in enumerate(stack):
                arriving.take(part, shard, (e, e), held, 0, cpu)
    matrices = arriving.finished(torch.float32)
    whole = first.dequantize(torch.float32), second.dequantize(torch.float32)
    experts = PackedExperts(matrices, silu_and_mul)
    x, factors, chosen = inputs("cpu")
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for slot in range(2):
            e = chosen[token, slot]
            out[token] += whole[1][e] @ silu_and_mul(whole[0][e] @ x[token]) * factors[token, slot]
    torch.testing.assert_close(experts(x, factors, chosen), out, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_cut_over_two_devices(rank: int) -> None:
    made = weights(CHOICES["gate and up differ"])
    experts = PackedExperts(arrived(made, "cpu", rank, 2).finished(torch.float32), silu_and_mul)
    x, factors, chosen = inputs("cpu")
    half = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
    wanted = expected(made, x, factors, chosen, cut=half)
    torch.testing.assert_close(experts(x, factors, chosen), wanted, atol=1e-3, rtol=1e-4)


def test_an_expert_that_is_missing_or_cannot_be_cut() -> None:
    made = weights(CHOICES["one coding"])
    with pytest.raises(ValueError, match=r"layer: w2 of expert 0: its 64 inputs cannot be split over 4 devices"):
        arrived(made, "cpu", 0, 4).finished(torch.float32)
    del made["w3", 2]
    with pytest.raises(FormatError, match="layer: the files have no w3 of expert 2"):
        arrived(made, "cpu").finished(torch.float32)


def test_what_another_device_has_is_not_kept() -> None:
    arriving = ArrivingExperts("layer", COUNT, HIDDEN, INNER, 1, CODECS)
    q = weights(CHOICES["one coding"])["w1", 0]
    part = next(iter(q.parts))
    assert not arriving.take(part, "w1", (7, -1), q.parts[part], 0, torch.device("cpu"))
    assert not arriving.matrices


@pytest.mark.cuda
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_graph_records_experts_whichever_are_chosen(choice: str, dtype: torch.dtype, cuda_device: str) -> None:
    made = weights(CHOICES[choice])
    experts = PackedExperts(arrived(made, cuda_device).finished(dtype), silu_and_mul)
    x, factors, chosen = inputs(cuda_device)
    x = x.to(dtype)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        experts(x, factors, chosen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, factors, chosen)
    for _ in range(2):
        chosen.copy_((chosen + 1) % COUNT)
        graph.replay()
        wanted = expected(made, x, factors, chosen)
        atol = 0.02 * wanted.abs().max().item() if dtype == torch.bfloat16 else 1e-3
        torch.testing.assert_close(out.float(), wanted, atol=atol, rtol=0.02 if dtype == torch.bfloat16 else 1e-4)
