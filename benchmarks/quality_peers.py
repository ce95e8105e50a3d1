"""Quantizers of other formats, for benchmarks/quality.py: each takes a float32 matrix and returns the decoded values.

llama.cpp's are functions of its own library (``libggml-base.so`` of a build, named by ``KBITQ_GGML``), called without
an importance matrix; the package gguf decodes. bitsandbytes' are functions of the package.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable

import numpy as np
import torch

Kept = Callable[[torch.Tensor], torch.Tensor]
"""float32 ``[rows, cols]`` to float32 of the same shape: quantized and decoded."""


def llama_cpp(name: str) -> tuple[Kept, float]:
    """A type of llama.cpp by its name, and its bits per weight."""
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    per_block, nbytes = gguf.GGML_QUANT_SIZES[kind]

    def kept(w: torch.Tensor) -> torch.Tensor:
        rows, cols = w.shape
        values = np.ascontiguousarray(w.numpy())
        packed = np.empty((rows, cols // per_block * nbytes), dtype=np.uint8)
        written = _ggml().ggml_quantize_chunk(
            int(kind), values.ctypes.data, packed.ctypes.data, 0, rows, cols, ctypes.c_void_p()
        )
        if written != packed.nbytes:
            raise RuntimeError(f"{name}: the library wrote {written} bytes, not {packed.nbytes}")
        return torch.from_numpy(gguf.quants.dequantize(packed, kind).reshape(rows, cols))

    return kept, 8 * nbytes / per_block


@functools.cache
def _ggml() -> ctypes.CDLL:
    if "KBITQ_GGML" not in os.environ:
        raise SystemExit("Measuring llama.cpp's types needs its library: KBITQ_GGML=PATH/libggml-base.so")
    library = ctypes.CDLL(os.environ["KBITQ_GGML"])
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def nf4(name: str) -> tuple[Kept, float]:
    """NF4 of bitsandbytes with blocks of 64: ``NF4`` with float32 scales, ``NF4 double`` with quantized ones."""
    from bitsandbytes import functional

    double = name == "NF4 double"

    def kept(w: torch.Tensor) -> torch.Tensor:
        packed, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=double)
        return functional.dequantize_4bit(packed, state).float()

    return kept, 4 + (8 / 64 + 32 / (64 * 256) if double else 32 / 64)


def replace_weights(model: torch.nn.Module, kept: Kept) -> None:
    """Every Linear weight but the head's becomes what the format keeps of it, in the model's dtype."""
    for weight in _weights(model):
        weight.data.copy_(kept(weight.data.float()))


def _weights(model: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    found = ((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    return [module.weight for name, module in found if name != "lm_head"]
