"""What llama.cpp calls the parts of a model, and what Hugging Face does: tensors, and fields of config.json.

From llama.cpp's converter and tensor names (gguf-py/gguf/constants.py, convert_hf_to_gguf.py) and transformers' models,
for the architectures named here. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

# Keys of the metadata, without the architecture's name, and fields of config.json.
_CONFIG = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_HEAD = {"attention.key_length": "head_dim"}
_MOE = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN_MOE = {**_CONFIG, **_MOE, "expert_feed_forward_length": "moe_intermediate_size"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_GPT2_CONFIG = {
    "context_length": "n_positions",
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp as Hugging Face has it.

    Attributes:
        model_type: in config.json.
        model_class: its class with a language model's head.
        top: names outside the layers.
        layer: names inside a layer; ``{e}`` stands for the number of an expert.
        config: fields of config.json by key.
        defaults: fields that llama.cpp takes for granted.
        prefix: of layers, before their number.
        permuted: whether rows of q and k lie in llama.cpp's order.
        norm_offset: whether 1 was added to the weights of norms.
        transposed: names of a layer whose matrices Hugging Face has the other way round.
    """

    model_type: str
    model_class: str
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    config: Mapping[str, str] = field(default_factory=lambda: _CONFIG)
    defaults: Mapping[str, object] = field(default_factory=dict)
    prefix: str = "model.layers."
    permuted: bool = False
    norm_offset: bool = False
    transposed: tuple[str, ...] = ()


_LLAMA_CONFIG = {**_CONFIG, **_HEAD, "rope.dimension_count": "head_dim"}
_ACTIVATION = {"hidden_act": "silu"}
_GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
_GEMMA_LAYER = {**LAYER, **_GEMMA_NORMS}
MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    layer={**LAYER, **_MIXTRAL_EXPERTS},
    config={**_LLAMA_CONFIG, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    defaults=_ACTIVATION,
    permuted=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", config=_LLAMA_CONFIG, defaults=_ACTIVATION, permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", defaults=_ACTIVATION),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        layer={**LAYER, **_QWEN_EXPERTS},
        config={**_QWEN_MOE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        defaults=_ACTIVATION,
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", config={**_CONFIG, **_HEAD}, defaults=_ACTIVATION),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        layer={**LAYER, **_QWEN_EXPERTS},
        config={**_QWEN_MOE, **_HEAD},
        defaults={**_ACTIVATION, "norm_topk_prob": True},
    ),
    "gemma": Architecture(
        "gemma",
        "GemmaForCausalLM",
        config={**_CONFIG, **_HEAD},
        defaults={**_GEMMA_ACTIVATION, "hidden_act": "gelu_pytorch_tanh"},
        norm_offset=True,
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        layer=_GEMMA_LAYER,
        config={
            **_CONFIG,
            **_HEAD,
            **_WINDOW,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults=_GEMMA_ACTIVATION,
        norm_offset=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        layer=_GEMMA_LAYER,
        config={**_CONFIG, **_HEAD, **_WINDOW},
        defaults=_GEMMA_ACTIVATION,
        norm_offset=True,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        layer={**LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        config={**_CONFIG, **_WINDOW},
        defaults=_ACTIVATION,
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        top=_GPT2_TOP,
        layer=_GPT2_LAYER,
        config=_GPT2_CONFIG,
        defaults={"activation_function": "gelu_new"},
        prefix="transformer.h.",
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
}
