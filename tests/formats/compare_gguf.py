"""Decodes GGUF blocks that ggml itself quantized with ggml, gguf and kbitq, and a model with transformers and kbitq.

PYTHONPATH=tests python tests/formats/compare_gguf.py        (libggml-python 0.20.2, gguf 0.19.0, transformers 5.23.0)
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import libggml
import numpy as np
import torch

from formats.reading import decoded
from helpers.gguf_file import BLOCKS, gguf_bytes, llama_metadata, llama_tensors
from helpers.small_models import llama_config
from kbitq.checkpoint.source.recognise import open_source
from kbitq.format.ggml_types import BY_NAME
from kbitq.functional import dequantize_gguf

ROWS, COLS = 24, 1024
Floats = ctypes.POINTER(ctypes.c_float)


class Traits(ctypes.Structure):
    """ggml_type_traits of ggml.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("values", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("nbytes", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, Floats, ctypes.c_int64)),
        ("from_float", ctypes.CFUNCTYPE(None, Floats, ctypes.c_void_p, ctypes.c_int64)),
    ]


def library() -> Any:
    found = ctypes.CDLL(str(Path(libggml.__file__).parent / "lib64" / "libggml-base.so"))
    found.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    found.ggml_quantize_chunk.restype = ctypes.c_size_t
    found.ggml_quantize_chunk.argtypes = [ctypes.c_int, Floats, ctypes.c_void_p, *[ctypes.c_int64] * 3, Floats]
    return found


def floats(array: np.ndarray) -> Any:
    return array.ctypes.data_as(Floats)


def compare_blocks(ggml: Any, kind: str) -> list[str]:
    """The packages that decode what ggml quantized to other bits than kbitq."""
    number, traits = BY_NAME[kind].number, ggml.ggml_get_type_traits(BY_NAME[kind].number).contents
    weights = np.random.default_rng(number).standard_normal((ROWS, COLS)).astype(np.float32)
    raw = np.zeros(ROWS * COLS // traits.values * traits.nbytes, np.uint8)
    if kind == "Q8_K":  # the table of types leaves out how
        ggml.quantize_row_q8_K_ref(floats(weights), ctypes.c_void_p(raw.ctypes.data), ctypes.c_int64(weights.size))
    else:
        ggml.ggml_quantize_init(number)
        every = np.ones(COLS, np.float32)
        ggml.ggml_quantize_chunk(number, floats(weights), raw.ctypes.data, 0, ROWS, COLS, floats(every))
    want = np.empty_like(weights)
    if kind == "Q8_K":
        ggml.dequantize_row_q8_K(ctypes.c_void_p(raw.ctypes.data), floats(want), ctypes.c_int64(want.size))
    else:
        traits.to_float(raw.ctypes.data, floats(want), want.size)
    mine = dequantize_gguf(torch.from_numpy(raw), kind, (ROWS, COLS)).numpy()
    wrong = [] if np.array_equal(mine, want) else [f"{kind}: ggml"]
    if kind != "Q8_K":
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(want.shape)
        wrong += [] if np.array_equal(mine, theirs) else [f"{kind}: gguf"]
    error = float(np.square(mine - weights).mean())
    return wrong + ([] if error < 0.8 else [f"{kind}: what was decoded is not what was quantized ({error})"])


def compare_model() -> list[str]:
    """Tensors and fields of config.json that transformers reads from a file in another way."""
    import transformers

    config = llama_config(num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(1)
    state = {n: p.detach().numpy() for n, p in transformers.LlamaForCausalLM(config).state_dict().items()}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "m.gguf"
        tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(320)]}
        path.write_bytes(gguf_bytes(llama_metadata(config) | tokens, llama_tensors(state, 4, 2)))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file="m.gguf", dtype=torch.float32)
        mine, said = decoded(path, 1 << 20), open_source(path).config or {}
    found = theirs.state_dict()
    wrong = [f"model: {n}" for n, w in mine.items() if not torch.equal(w.float(), found[n])]
    fields = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "head_dim",
    )
    return wrong + [f"config: {f}" for f in fields if said.get(f) != getattr(theirs.config, f)]


def main() -> int:
    ggml = library()
    wrong = [difference for kind in BLOCKS for difference in compare_blocks(ggml, kind)]
    print(f"gguf: {len(BLOCKS)} types, {len(wrong)} differences")
    wrong += compare_model()
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
