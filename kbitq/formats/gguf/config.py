"""config.json from the metadata of a GGUF file, as far as it goes. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kbitq.formats.gguf.architectures import Architecture
from kbitq.formats.gguf.container import GgufTensor, integer
from kbitq.formats.gguf.llama3_rope import llama3_scaling
from kbitq.formats.gguf.names import architecture_of
from kbitq.formats.gguf.vector_dtype import CANDIDATES

_SPECIAL = ("bos", "eos", "padding")
_ROPE_KINDS = ("linear", "yarn")


def config_of(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    floats: Callable[[GgufTensor], list[float]],
    dtype: str | None = None,
) -> tuple[dict[str, Any] | None, list[str]]:
    """The fields of config.json, and sentences about what is missing in it.

    Args:
        metadata: of the file.
        tensors: of the file, by llama.cpp's name.
        floats: reads a small float32 tensor.
        dtype: of the model's vectors (``vector_dtype``), where that could be told.

    Returns:
        None and the reason, for an architecture that is not known here.
    """
    architecture = architecture_of(metadata)
    stem = metadata.get("general.architecture")
    if architecture is None:
        return None, [f"config.json cannot be rebuilt: llama.cpp's architecture {str(stem)[:40]!r} is not known here"]
    config: dict[str, Any] = {"architectures": [architecture.model_class], "model_type": architecture.model_type}
    config |= architecture.defaults
    config |= _fields(architecture, metadata, str(stem))
    config |= _tokens(metadata)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if (embedding := tensors.get("token_embd.weight")) is not None:
        config["vocab_size"] = embedding.shape[0]
    if architecture.model_type in ("llama", "mixtral"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    scaling, missing = _rope(metadata, str(stem), config, tensors, floats)
    if scaling:
        config["rope_scaling"] = scaling
    config["torch_dtype"] = CANDIDATES[dtype or "BF16"]
    return config, missing + _unsaid(architecture, config)


def _fields(architecture: Architecture, metadata: Mapping[str, Any], stem: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, name in architecture.config.items():
        value = metadata.get(f"{stem}.{key}")
        if isinstance(value, list):
            value = integer(metadata, f"{stem}.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            fields.setdefault(name, _short(value))
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if architecture.model_type == "gemma2" and isinstance(heads, int) and isinstance(hidden, int) and heads:
        # The 27B model divides by hidden / heads; the others by the size of a head.
        big = fields.get("num_hidden_layers") == 46
        fields["query_pre_attn_scalar"] = hidden // heads if big else fields.get("head_dim", hidden // heads)
    return fields


def _short(value: float) -> float:
    """A float32 as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, int):
        return value
    return float(f"{value:.7g}")


def _tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    fields = {}
    for name in _SPECIAL:
        if (token := integer(metadata, f"tokenizer.ggml.{name}_token_id", 0)) is not None:
            fields[f"{'pad' if name == 'padding' else name}_token_id"] = token
    return fields


def _rope(
    metadata: Mapping[str, Any],
    stem: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    floats: Callable[[GgufTensor], list[float]],
) -> tuple[dict[str, Any] | None, list[str]]:
    """``rope_scaling``, and what of it cannot be told."""
    kind, factor = metadata.get(f"{stem}.rope.scaling.type"), metadata.get(f"{stem}.rope.scaling.factor")
    original = integer(metadata, f"{stem}.rope.scaling.original_context_length")
    if kind in _ROPE_KINDS and isinstance(factor, float):
        scaling = {"rope_type": kind, "factor": _short(factor)}
        return scaling | ({"original_max_position_embeddings": original} if original else {}), []
    if (freqs := tensors.get("rope_freqs.weight")) is not None:
        found = llama3_scaling(floats(freqs), config.get("rope_theta", 10000.0))
        return (
            (found, []) if found else (None, ["rope_scaling is missing in config.json: rope_freqs is of no known kind"])
        )
    long, short = (tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long is not None and short is not None:
        factors = {"long_factor": floats(long), "short_factor": floats(short)}
        if all(factors.values()):
            return {"rope_type": "longrope", **factors}, []
        return None, ["rope_scaling is missing in config.json: its factors are no list of numbers"]
    return None, []


def _unsaid(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    wanted = {name for name in architecture.config.values() if name not in ("sliding_window", "head_dim")}
    missing = sorted(wanted - set(config))
    return [f"config.json lacks {', '.join(missing)}, which the file does not say"] if missing else []


def json_text(value: Any) -> bytes:
    """JSON as transformers writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n").encode("utf-8", "replace")
