"""Small, randomly initialised models of the kinds that matter to loading, and inputs for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    settings = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64, "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def moe_config(**changes: Any) -> Any:
    from transformers import Qwen3MoeConfig

    settings = {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 72, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "num_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return Qwen3MoeConfig(**{**settings, **changes})


def gpt2_config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=320, n_positions=64, initializer_range=0.2)


def bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=160, vocab_size=320,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip


def vit_config() -> Any:
    from transformers import ViTConfig

    return ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=160, image_size=32, patch_size=8,
        initializer_range=0.2,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": llama_config,
    "llama-tied": lambda: llama_config(tie_word_embeddings=True),
    "moe": moe_config,
    "gpt2": gpt2_config,
    "bert": bert_config,
    "vit": vit_config,
}


def auto_class(kind: str) -> Any:
    import transformers

    return transformers.AutoModel if kind in ("bert", "vit") else transformers.AutoModelForCausalLM


def make_model(kind: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A randomly initialised model."""
    torch.manual_seed(seed)
    return auto_class(kind).from_config(CONFIGS[kind]()).to(dtype).eval()


def sample_inputs(kind: str, rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    return {"input_ids": torch.arange(rows * length).reshape(rows, length) * 31 % 320}


def outputs(model: Any, kind: str) -> torch.Tensor:
    """Logits, or the last hidden states of a model without a head."""
    given = {n: t.to(model.device) for n, t in sample_inputs(kind).items()}
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
    with torch.no_grad():
        result = model(**given)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters, 97 of them."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<eos>", "<unk>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder)


def save_with_tokenizer(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model and the tokenizer of single characters; the folder."""
    model.save_pretrained(folder, **options)
    save_tokenizer(folder)
    return folder


def load_complete(kind: str, folder: Path, **options: Any) -> Any:
    """A model of a quantized folder: nothing is missing or left over, and no packed weight has a gradient."""
    from kbitq.nn.packed import PackedModule

    model, info = auto_class(kind).from_pretrained(folder, output_loading_info=True, **options)
    assert [info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set()] * 3
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]
    parts = [part for module in packed for name in module.packed_names() for part in module.parts_of(name).values()]
    assert not any(part.requires_grad for part in parts)
    return model
