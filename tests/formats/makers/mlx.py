"""Checkpoints of MLX 0.32.4, by mlx.core on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from formats.makers.cases import Case, weights

# mode, bits, group, rows, columns, dtype
FIXTURES: list[tuple[Any, ...]] = [
    *(("affine", bits, 32, 16, 64, "bfloat16") for bits in (2, 3, 4, 5, 6, 8)),
    ("affine", 4, 64, 20, 128, "float16"),
    ("affine", 3, 128, 12, 128, "float32"),
    *(
        (mode, bits, group, 16, 64, "bfloat16")
        for mode, bits, group in (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32))
    ),
]
SHAPES: list[tuple[Any, ...]] = [
    *(
        ("affine", bits, group, rows, cols, dtype)
        for bits in (2, 3, 4, 5, 6, 8)
        for group in (32, 64, 128)
        for rows, cols in ((96, 384), (160, 1024))
        for dtype in ("bfloat16", "float16", "float32")
    ),
    *(
        (mode, bits, group, rows, cols, "bfloat16")
        for mode, bits, group in (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32))
        for rows, cols in ((96, 384), (160, 1024))
    ),
]


def make(which: list[tuple[Any, ...]]) -> Iterator[Case]:
    """A case for each."""
    import mlx.core as mx

    def to_torch(array: Any) -> Tensor:
        if array.dtype == mx.bfloat16:
            return torch.from_numpy(np.array(array.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))

    for seed, (mode, bits, group, rows, cols, dtype) in enumerate(which):
        w = mx.array(weights(rows, cols, seed).numpy()).astype(getattr(mx, dtype))
        parts = mx.quantize(w, group_size=group, bits=bits, mode=mode)
        decoded = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode)
        names = ("model.a.weight", "model.a.scales", "model.a.biases")
        tensors = {name: to_torch(part) for name, part in zip(names, parts, strict=False)}
        told = {"group_size": group, "bits": bits, "mode": mode}
        name = f"{mode}, {bits} bits, group {group}, {rows}x{cols}, {dtype}"
        yield Case(name, {"quantization": told}, tensors, {"model.a.weight": to_torch(decoded)})
