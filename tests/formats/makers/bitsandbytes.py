"""Checkpoints as transformers saves them with bitsandbytes 0.50.2.

Decoded by its own torch implementation, which says of itself that it matches the CUDA kernels. Its vector code for the
CPU has other values where the columns are not whole blocks (it begins blocks anew in each row, which quantizing does
not), and -0.0 for FP4's second zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from formats.makers.cases import Case, weights

# kind, nested, block, rows, columns, dtype
FIXTURES: list[tuple[Any, ...]] = [
    ("nf4", False, 64, 32, 64, torch.bfloat16),
    ("nf4", True, 64, 64, 80, torch.float16),
    ("fp4", False, 64, 24, 96, torch.bfloat16),
    ("fp4", True, 128, 40, 66, torch.float32),
    ("nf4", False, 64, 9, 50, torch.float16),
    ("int8", False, 0, 32, 64, torch.float32),
]
SHAPES: list[tuple[Any, ...]] = [
    *(
        (kind, nested, block, rows, cols, dtype)
        for kind in ("nf4", "fp4")
        for nested in (False, True)
        for block in (64, 128, 256, 4096)
        for rows, cols in ((96, 384), (160, 1024), (33, 130))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
    ("int8", False, 0, 96, 384, torch.float32),
]


def make(which: list[tuple[Any, ...]]) -> Iterator[Case]:
    """A case for each."""
    import bitsandbytes.functional as bnb

    for seed, (kind, nested, block, rows, cols, dtype) in enumerate(which):
        name = f"{kind}{', nested' if nested else ''}, blocks of {block}, {rows}x{cols}, {dtype}"
        w = weights(rows, cols, seed, dtype)
        if kind == "int8":
            codes, scales, _ = bnb.int8_vectorwise_quant(w.half())
            tensors = {"model.a.weight": codes, "model.a.SCB": scales, "model.a.weight_format": torch.tensor(0).byte()}
            decoded = bnb.int8_vectorwise_dequant(codes, scales)
            config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        else:
            codes, state = bnb.quantize_4bit(w, blocksize=block, compress_statistics=nested, quant_type=kind)
            told = state.as_dict(packed=True)
            tensors = {"model.a.weight": codes, **{f"model.a.weight.{key}": value for key, value in told.items()}}
            decoded = _decoded(codes, bnb.QuantState.from_dict(dict(told), torch.device("cpu")))
            config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        yield Case(name, {"quantization_config": config}, tensors, {"model.a.weight": decoded})


def _decoded(codes: Tensor, state: Any) -> Tensor:
    import bitsandbytes.functional as bnb
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    found = _dequantize_4bit_compute(codes.view(-1), absmax, state.code, state.blocksize, state.shape, state.dtype)
    if state.shape[1] % state.blocksize == 0:  # there both are right
        assert found.equal(bnb.dequantize_4bit(codes, state))
    return found
