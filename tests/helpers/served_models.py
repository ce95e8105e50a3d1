"""Tiny folders for inference servers: what may differ inside a fused layer does, and sizes are no multiples of 32."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from helpers.small_models import llama_config, moe_config, save_tokenizer

PROMPTS = [[5, 17, 40, 33, 21], [70 + i for i in range(20)]]
NEW_TOKENS = 24

MIXED_RULES = (
    "*embed_tokens*=k6", "*o_proj*=k4",
    "*layers.0.self_attn.q_proj*=k4", "*layers.0.self_attn.k_proj*=k3", "*layers.0.self_attn.v_proj*=keep",
    "*layers.1.self_attn.q_proj*=trellis:k2", "*layers.2.self_attn.q_proj*=keep",
    "*layers.2.self_attn.k_proj*=keep", "*layers.2.self_attn.v_proj*=keep",
    "*layers.0.mlp.gate_proj*=trellis:k3", "*layers.0.mlp.up_proj*=k5", "*layers.0.mlp.down_proj*=trellis:k4",
    "*layers.2.mlp.experts.*.gate_proj*=trellis:k3", "*layers.2.mlp.experts.1.up_proj*=k4",
)  # fmt: skip
"""Of the mixed folder: K, codecs and kept weights side by side in q/k/v, gate/up and the experts."""


def mixed_folder(folder: Path) -> Path:
    """A Qwen3 MoE with tied, quantized embeddings: a dense layer, one with fused experts, one with experts apart."""
    config = moe_config(
        hidden_size=80, intermediate_size=192, moe_intermediate_size=128, num_hidden_layers=3, head_dim=32,
        vocab_size=330, max_position_embeddings=256, mlp_only_layers=[0], tie_word_embeddings=True, attention_bias=True,
    )  # fmt: skip
    source = _source(folder, config)
    _fuse_experts(source, "model.layers.1.mlp.experts")
    return _quantized(source, folder, MIXED_RULES, k=3, keep_embeddings=False)


def trellis_folder(folder: Path) -> Path:
    """A Llama of one codec and K, biases, and an output head that is quantized while the embedding is kept."""
    config = llama_config(
        hidden_size=80, intermediate_size=200, head_dim=32, vocab_size=330, max_position_embeddings=256,
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    return _quantized(_source(folder, config), folder, ("lm_head*=k2",), k=2, codec="trellis")


def shared_folder(folder: Path) -> Path:
    """A Qwen2 MoE, each of whose layers has a shared expert beside the others; one K."""
    from transformers import Qwen2MoeConfig

    config = Qwen2MoeConfig(
        hidden_size=128, intermediate_size=192, moe_intermediate_size=72, shared_expert_intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=330, num_experts=4,
        max_position_embeddings=256, num_experts_per_tok=2, initializer_range=0.2,
    )  # fmt: skip
    return _quantized(_source(folder, config), folder, (), k=3)


def _source(folder: Path, config: Any) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    for name, bias in model.named_parameters():
        # Of its attention output vLLM ignores the bias: Qwen3 MoE has none.
        if name.endswith(("q_proj.bias", "v_proj.bias") if config.model_type == "qwen3_moe" else "bias"):
            torch.nn.init.normal_(bias, std=0.5)
    source = folder.with_name(folder.name + "-source")
    model.save_pretrained(source)
    save_tokenizer(source)
    return source


def _fuse_experts(source: Path, stem: str) -> None:
    """Store the experts below ``stem`` as two stacks."""
    from safetensors.torch import load_file, save_file

    path = source / "model.safetensors"
    tensors = load_file(path)
    apart = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{stem}.")}
    count = 1 + max(int(name[len(stem) + 1 :].split(".")[0]) for name in apart)
    both = [torch.cat([apart[f"{stem}.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(count)]
    tensors[f"{stem}.gate_up_proj"] = torch.stack(both)
    tensors[f"{stem}.down_proj"] = torch.stack([apart[f"{stem}.{e}.down_proj.weight"] for e in range(count)])
    save_file(tensors, path, metadata={"format": "pt"})


def _quantized(source: Path, folder: Path, rules: Sequence[str], **options: Any) -> Path:
    from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
    from kbitq.choose.recipe import parse_rule

    run(plan_quantize(source, folder, QuantizeOptions(rules=tuple(map(parse_rule, rules)), **options)))
    return folder


def adapter_of(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A LoRA adapter for attention, MLP and output head of a Llama, and what it adds to each of their weights."""
    import json

    from safetensors import safe_open
    from safetensors.torch import save_file

    wanted, factors, added = ("q_proj", "v_proj", "down_proj", "lm_head"), {}, {}
    with safe_open(folder.with_name(folder.name + "-source") / "model.safetensors", "pt") as source:
        shapes = {name: source.get_slice(name).get_shape() for name in source.keys()}  # noqa: SIM118
    for name, (rows, cols) in ((n, s) for n, s in shapes.items() if n.removesuffix(".weight").endswith(wanted)):
        a, b = torch.randn(8, cols) * 0.1, torch.randn(rows, 8) * 0.1
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        factors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        added[name] = b @ a
    adapter = folder.with_name(folder.name + "-adapter")
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(wanted), "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    return adapter, added


def greedy_tokens(folder: Path, added: Mapping[str, torch.Tensor] | None = None) -> list[list[int]]:
    """What transformers generates in float32 from the decoded folder: it does not take every mixture packed.

    Args:
        folder: of quantized weights.
        added: to weights, by name.
    """
    from transformers import AutoModelForCausalLM

    from kbitq.checkpoint import dequantize_checkpoint

    decoded = folder.with_name(folder.name + "-decoded")
    if not decoded.exists():
        dequantize_checkpoint(folder, decoded)
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    for name, more in (added or {}).items():
        model.get_parameter(name).data += more
    options: Mapping[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    made = [model.generate(torch.tensor([ids]), pad_token_id=0, **options)[0, len(ids) :] for ids in PROMPTS]
    return [tokens.tolist() for tokens in made]
