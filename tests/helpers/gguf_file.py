"""Writes GGUF files, right ones and hostile ones, without the package gguf."""

import hashlib
import struct

import numpy as np

from kbitq.format.ggml_types import BY_NAME, TYPES

BLOCKS = [t.name for t in TYPES if t.plain is None]

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(v):
    """A value with its type before it."""
    if isinstance(v, bool):
        return struct.pack("<I?", BOOL, v)
    if isinstance(v, int):
        return struct.pack("<II", U32, v)
    if isinstance(v, float):
        return struct.pack("<If", F32, v)
    if isinstance(v, str | bytes):
        return struct.pack("<I", STRING) + text(v)
    assert isinstance(v, list) and v
    head = struct.pack("<I", ARRAY)
    if isinstance(v[0], str):
        return head + struct.pack("<IQ", STRING, len(v)) + b"".join(map(text, v))
    code, kind = ("f", F32) if isinstance(v[0], float) else ("i", I32)
    return head + struct.pack(f"<IQ{len(v)}{code}", kind, len(v), *v)


def tensor_entry(name, kind, shape, offset):
    number = kind if isinstance(kind, int) else BY_NAME[kind].number
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, offset)


def gguf_bytes(metadata, tensors, version=3, alignment=32, magic=b"GGUF", counts=None, entries=None):
    """A file. ``tensors``: (type, shape, bytes) by name; ``counts`` and ``entries`` replace what would be right."""
    data, rows, offset = b"", [], 0
    for name, (kind, shape, raw) in tensors.items():
        rows.append(tensor_entry(name, kind, shape, offset))
        data += raw + bytes(-len(raw) % alignment)
        offset = len(data)
    n_tensors, n_entries = counts or (len(tensors), len(metadata))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_entries)
    head += b"".join(text(k) + value(v) for k, v in metadata.items())
    head += b"".join(rows if entries is None else entries)
    return head + bytes(-len(head) % alignment) + data


def f32(array):
    """A plain tensor for ``gguf_bytes``."""
    array = np.ascontiguousarray(array, np.float32)
    return "F32", array.shape, array.tobytes()


def random_blocks(kind, blocks, seed=0):
    """Bytes of blocks, every one of which means something to ggml."""
    size = BY_NAME[kind].nbytes
    return np.random.default_rng([seed, BY_NAME[kind].number]).integers(0, 256, (blocks, size), np.uint8)


def digest(values):
    """Of float32 values; which NaN a NaN is does not count."""
    values = np.where(np.isnan(values), np.float32(0), values)
    return hashlib.sha256(np.ascontiguousarray(values, np.float32).tobytes()).hexdigest()


def finite_blocks(kind, blocks, seed=0):
    """Blocks whose scales are ordinary numbers, as those of a model are."""
    raw = random_blocks(kind, blocks, seed)
    for at in _HALVES.get(kind, ()):
        raw[:, at + 1] = raw[:, at + 1] & 0x83 | 0x20  # a half of some 2^-7
    if kind == "Q8_K":
        raw[:, :4] = np.frombuffer(struct.pack("<f", 0.01), np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = 110 + raw[:, 0] % 16
    if kind == "IQ1_M":
        raw[:, 55] = raw[:, 55] & 0x0F | 0x20
        raw[:, 53] = raw[:, 53] & 0x0F
    return raw


_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"), (0,)),
    **dict.fromkeys(("IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip


def to_ggml_rows(weight, heads):
    """Rows of q or k in llama.cpp's order (its converter's ``permute``)."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def llama_tensors(state, heads, kv_heads):
    """A model's tensors (numpy, Hugging Face's names) as a GGUF file of architecture llama has them, float32."""
    renamed = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    tensors = {}
    for name, weight in state.items():
        stem, _, end = name.rpartition(".")
        layer = stem.removeprefix("model.layers.").partition(".")
        key = f"blk.{layer[0]}.{renamed[layer[2]]}" if stem.startswith("model.layers.") else renamed[stem]
        if key.endswith(("attn_q", "attn_k")):
            weight = to_ggml_rows(weight, heads if key.endswith("q") else kv_heads)
        tensors[f"{key}.{end}"] = f32(weight)
    return tensors


def llama_metadata(config):
    """Of a transformers LlamaConfig."""
    return {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": config.hidden_size // config.num_attention_heads,
    }
