"""SGLang's layers, with stand-ins for SGLang's base classes: its packages cannot be had without a GPU.

What the methods compute is tested in tests/integrations/serving. Here it is what SGLang does otherwise than vLLM: how
it registers, hands over ranks, ties heads, runs experts and says nothing of where a folder lies.
"""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import kbitq
from kbitq.quantized import QuantizedTensor

CONFIG: dict[str, Any] = {
    "quant_method": "kbitq", "format_version": 2, "block_size": 32, "scale_format": "e4m4", "k": 3,
    "overrides": {"model.layers.0.self_attn.k_proj": {"codec": "trellis"}},
    "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.gate"],
}  # fmt: skip


class BasevLLMParameter(torch.nn.Parameter):
    """As SGLang's: the loader can be given once, and ranks come as arguments."""

    def __new__(cls, data: torch.Tensor, **_: Any) -> Any:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: torch.Tensor, weight_loader: Any) -> None:
        self._weight_loader = weight_loader

    @property
    def weight_loader(self) -> Any:
        return self._weight_loader


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


def made(name: str, *bases: type) -> type:
    return type(name, bases, {})


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stand-ins for the modules of SGLang that the plug-in imports."""
    linear_base, vocabulary = (made(n, torch.nn.Module) for n in ("LinearBase", "VocabParallelEmbedding"))
    found = {
        "layers": {},
        "layers.linear": {"LinearBase": linear_base, "WEIGHT_LOADER_V2_SUPPORTED": []},
        "layers.moe": {}, "layers.moe.fused_moe_triton": {},
        "layers.moe.fused_moe_triton.layer": {"FusedMoE": made("FusedMoE", torch.nn.Module)},
        "layers.moe.token_dispatcher": {"StandardCombineInput": StandardCombineInput},
        "layers.parameter": {
            "BasevLLMParameter": BasevLLMParameter,
            "PerTensorScaleParameter": made("PerTensorScaleParameter", BasevLLMParameter),
        },
        "layers.quantization": {"QUANTIZATION_METHODS": {}, "CPU_QUANTIZATION_METHODS": {}},
        "layers.quantization.base_config": {
            name: type(name, (), {"packed_modules_mapping": {}})
            for name in ("FusedMoEMethodBase", "LinearMethodBase", "QuantizationConfig", "QuantizeMethodBase")
        },
        "layers.quantization.unquant": {"UnquantizedLinearMethod": made("UnquantizedLinearMethod")},
        "layers.vocab_parallel_embedding": {
            "VocabParallelEmbedding": vocabulary, "ParallelLMHead": made("ParallelLMHead", vocabulary),
        },
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in ("sglang", "sglang.srt", *(f"sglang.srt.{name}" for name in found))}
    for name, held in found.items():
        vars(modules[f"sglang.srt.{name}"]).update(held)
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
        monkeypatch.setitem(sys.modules, name, module)
    own = ("config", "methods")
    yield SimpleNamespace(**{name.replace(".", "_"): modules[f"sglang.srt.{name}"] for name in found})
    for name in own:  # they hold the stand-ins
        sys.modules.pop(f"kbitq.integrations.sglang.{name}", None)


@pytest.fixture
def config(sglang: SimpleNamespace) -> Any:
    from kbitq.integrations.sglang import register

    register()
    register()
    return sglang.layers_quantization.QUANTIZATION_METHODS["kbitq"].from_config(CONFIG)


def matrix(rows: int, cols: int, k: int, codec: str = "planes", seed: int = 0) -> QuantizedTensor:
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return kbitq.quantize(w, k, codec=codec)


def test_registration(sglang: SimpleNamespace, config: Any) -> None:
    held = sglang.layers_quantization
    assert held.QUANTIZATION_METHODS == held.CPU_QUANTIZATION_METHODS == {"kbitq": type(config)}
    assert sglang.layers_linear.WEIGHT_LOADER_V2_SUPPORTED == ["KbitqLinearMethod"]
    assert config.get_name() == "kbitq" and config.get_scaled_act_names() == []


def test_methods_by_what_the_config_says_is_kept(sglang: SimpleNamespace, config: Any) -> None:
    linear = sglang.layers_linear.LinearBase()
    embedding = sglang.layers_vocab_parallel_embedding.VocabParallelEmbedding()
    head = sglang.layers_vocab_parallel_embedding.ParallelLMHead()
    experts = sglang.layers_moe_fused_moe_triton_layer.FusedMoE()
    asked = {
        "model.layers.0.self_attn.qkv_proj": linear, "model.layers.1.mlp.gate": linear,
        "model.embed_tokens": embedding, "lm_head": head, "model.layers.1.mlp.experts": experts, "": torch.nn.ReLU(),
    }  # fmt: skip
    assert [type(config.get_quant_method(layer, name)).__name__ for name, layer in asked.items()] == [
        "KbitqLinearMethod", "UnquantizedLinearMethod", "KbitqVocabularyMethod", "NoneType", "KbitqExpertsMethod",
        "NoneType",
    ]  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fused_layer_over_two_devices(sglang: SimpleNamespace, config: Any, rank: int) -> None:
    def weight_loader_v2() -> None: ...

    q, k, v = matrix(64, 40, 3), matrix(32, 40, 3, "trellis", 1), torch.randn(32, 40)
    layer = sglang.layers_linear.LinearBase()
    method = config.get_quant_method(layer, "model.layers.0.self_attn.qkv_proj")
    method.create_weights(layer, 40, [32, 16, 16], 40, 128, torch.float32, weight_loader=weight_loader_v2)
    for shard, weight in zip("qkv", (q, k, v), strict=True):
        parts = {"": weight} if isinstance(weight, torch.Tensor) else {f"_{n}": t for n, t in weight.parts.items()}
        for name, tensor in parts.items():
            layer.get_parameter(f"weight{name}").load_qkv_weight(
                loaded_weight=tensor, num_heads=1, shard_id=shard, shard_offset=0, shard_size=1, tp_rank=rank,
                use_presharded_weights=False,
            )  # fmt: skip
    method.process_weights_after_loading(layer)
    whole = [w if isinstance(w, torch.Tensor) else w.dequantize(torch.float32) for w in (q, k, v)]
    own = torch.cat([w.chunk(2)[rank] for w in whole])
    x, bias = torch.randn(3, 40), torch.randn(64)
    wanted = torch.nn.functional.linear(x, own, bias)
    torch.testing.assert_close(method.apply(layer, x, bias), wanted, atol=1e-4, rtol=1e-4)


def test_a_tied_head_is_the_embedding(sglang: SimpleNamespace, config: Any) -> None:
    table = matrix(50, 40, 4)
    layer = sglang.layers_vocab_parallel_embedding.VocabParallelEmbedding()
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=50)
    method = config.get_quant_method(layer, "model.embed_tokens")
    method.create_weights(layer, 40, [64], 40, 64, torch.float32, weight_loader=None)
    assert layer.kbitq_tied  # so a GPU holds what products need
    for part, tensor in table.parts.items():
        held = layer.get_parameter(f"weight_{part}")
        held.weight_loader(held, tensor)
    method.process_weights_after_loading(layer)
    whole, x = table.dequantize(torch.float32), torch.randn(2, 40)
    assert torch.equal(method.embedding(layer, torch.tensor([7, 49])), whole[[7, 49]])
    torch.testing.assert_close(method.apply(layer, x)[:, :50], x @ whole.T, atol=1e-4, rtol=1e-4)
    assert not hasattr(layer, "weight")  # by which SGLang would multiply itself


def expert_layer(sglang: SimpleNamespace, method: Any, runner: Any) -> Any:
    layer = sglang.layers_moe_fused_moe_triton_layer.FusedMoE()
    layer.moe_tp_size, layer.moe_tp_rank = 1, 0
    layer._map_global_expert_id_to_local_expert_id = lambda e: e if e < 2 else -1
    method.create_weights(layer, 2, 48, 32, torch.float32, weight_loader=None)
    method.create_moe_runner(layer, runner)
    return layer


def test_experts(sglang: SimpleNamespace, config: Any) -> None:
    method = config.get_quant_method(sglang.layers_moe_fused_moe_triton_layer.FusedMoE(), "model.layers.1.mlp.experts")
    runner = SimpleNamespace(activation="silu", apply_router_weight_on_input=False, routed_scaling_factor=2.5)
    layer, weights = expert_layer(sglang, method, runner), {}
    for e in range(3):  # the third is another device's
        for i, (shard, stem) in enumerate((("w1", "w13"), ("w3", "w13"), ("w2", "w2"))):
            weights[shard, e] = matrix(*((48, 32) if shard == "w2" else (32, 48)), 3, seed=10 * e + i)
            for part, tensor in weights[shard, e].parts.items():
                held = layer.get_parameter(f"{stem}_weight_{part}")
                held.weight_loader(held, tensor, f"experts.{e}", shard_id=shard, expert_id=e)
    method.process_weights_after_loading(layer)
    x, ids, factors = torch.randn(3, 48), torch.tensor([[0, 1], [1, -1], [-1, -1]]), torch.rand(3, 2)
    wanted = torch.zeros(3, 48)
    for token, slot in ((0, 0), (0, 1), (1, 0)):
        w = {s: weights[s, int(ids[token, slot])].dequantize(torch.float32) for s in ("w1", "w2", "w3")}
        hidden = torch.nn.functional.silu(w["w1"] @ x[token]) * (w["w3"] @ x[token])
        wanted[token] += 2.5 * factors[token, slot] * (w["w2"] @ hidden)
    dispatched = SimpleNamespace(hidden_states=x, topk_output=(factors, ids.int(), None))
    torch.testing.assert_close(method.apply(layer, dispatched).hidden_states, wanted, atol=1e-4, rtol=1e-4)


def test_experts_with_an_activation_that_is_not_known(sglang: SimpleNamespace, config: Any) -> None:
    method = config.get_quant_method(sglang.layers_moe_fused_moe_triton_layer.FusedMoE(), "model.layers.1.mlp.experts")
    layer = expert_layer(sglang, method, SimpleNamespace(activation="situ"))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts: experts with the activation 'situ'"):
        method.process_weights_after_loading(layer)
