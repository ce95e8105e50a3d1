"""Checkpoints of hqq 0.2.8.post1, as its layers save themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from formats.makers.cases import Case, weights

# bits, group (None: a row), axis, rows, columns, dtype
FIXTURES: list[tuple[Any, ...]] = [
    *((bits, 32, 1, 40, 64, torch.float16) for bits in (8, 6, 5, 4, 3, 2, 1)),
    (4, 64, 0, 40, 64, torch.bfloat16),
    (3, 32, 0, 24, 64, torch.float16),
    (4, None, 1, 16, 96, torch.bfloat16),
]
SHAPES: list[tuple[Any, ...]] = [
    (bits, group, axis, rows, cols, dtype)
    for bits in (8, 6, 5, 4, 3, 2, 1)
    for group in (32, 64, 128)
    for axis in (0, 1)
    for rows, cols in ((96, 384), (160, 1024))
    for dtype in (torch.float16, torch.bfloat16)
]


def make(which: list[tuple[Any, ...]]) -> Iterator[Case]:
    """A case for each."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for seed, (bits, group, axis, rows, cols, dtype) in enumerate(which):
        linear = nn.Linear(cols, rows, bias=False)
        linear.weight.data = weights(rows, cols, seed)
        told = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
        told["weight_quant_params"]["optimize"] = False
        layer = HQQLinear(linear, told, compute_dtype=dtype, device="cpu", del_orig=False)
        tensors = {f"model.a.{key}": value.detach().contiguous() for key, value in layer.state_dict().items()}
        name = f"{bits} bits, group {group}, axis {axis}, {rows}x{cols}, {dtype}"
        config = {"quantization_config": {"quant_method": "hqq"}}
        yield Case(name, config, tensors, {"model.a.weight": layer.dequantize().detach().contiguous()})
