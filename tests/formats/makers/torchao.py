"""Checkpoints of torchao 0.18.0, flattened by its functions for safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from formats.makers.cases import Case, weights

# kind, bits, group (None: a row), rows, columns, dtype
FIXTURES: list[tuple[Any, ...]] = [
    ("intx", 4, 32, 16, 64, torch.bfloat16),
    ("intx", 3, 64, 16, 128, torch.float32),
    ("intx", 2, None, 16, 64, torch.bfloat16),
    ("int8", 8, None, 16, 64, torch.bfloat16),
    ("float8", 8, None, 16, 64, torch.bfloat16),
]
SHAPES: list[tuple[Any, ...]] = [
    (kind, bits, group, rows, cols, dtype)
    for kind, bits, group in (
        *(("intx", bits, group) for bits in (1, 2, 3, 4, 5, 6, 7, 8) for group in (32, 128, None)),
        ("int8", 8, None),
        ("float8", 8, None),
    )
    for rows, cols in ((96, 384), (160, 1024))
    for dtype in (torch.bfloat16, torch.float32)
]


def make(which: list[tuple[Any, ...]]) -> Iterator[Case]:
    """A case for each."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    for seed, (kind, bits, group, rows, cols, dtype) in enumerate(which):
        model = nn.Sequential(nn.Linear(cols, rows, bias=False))
        model[0].weight.data = weights(rows, cols, seed, dtype)
        quantize_(model, _config(kind, bits, group))
        weight = model[0].weight.data
        tensors, metadata = flatten_tensor_state_dict({"model.a.weight": weight})
        decoded = weight.dequantize().contiguous()
        name = f"{kind}, {bits} bits, group {group}, {rows}x{cols}, {dtype}"
        config = {"quantization_config": {"quant_method": "torchao"}}
        yield Case(name, config, tensors, {"model.a.weight": decoded}, metadata)


def _config(kind: str, bits: int, group: int | None) -> Any:
    from torchao import quantization as ao

    if kind == "int8":
        return ao.Int8WeightOnlyConfig(version=2)
    if kind == "float8":
        return ao.Float8WeightOnlyConfig(version=2)
    granularity = ao.PerGroup(group) if group else ao.PerAxis(0)
    return ao.IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=granularity, version=2)
