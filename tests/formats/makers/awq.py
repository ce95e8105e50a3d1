"""AWQ checkpoints by GPTQModel 7.7.0: packed and decoded by its functions for AWQ's GEMM order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from formats.makers.cases import Case

FIXTURES = [(64, 32, 32, torch.float16), (128, 48, 128, torch.bfloat16), (128, 40, 64, torch.float16)]
SHAPES = [
    (cols, rows, group, dtype)
    for cols, rows in ((128, 96), (384, 160), (1024, 328))
    for group in (32, 64, 128)
    for dtype in (torch.float16, torch.bfloat16)
]


def make(which: list[tuple[int, int, int, torch.dtype]]) -> Iterator[Case]:
    """A case for each: columns, rows, group, dtype of the scales."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq

    for seed, (cols, rows, group, dtype) in enumerate(which):
        random = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, (cols, rows), generator=random)
        zeros = torch.randint(0, 16, (cols // group, rows), generator=random)
        scales = (torch.rand(cols // group, rows, generator=random) * 0.01 + 1e-3).to(dtype)
        words, points = pack_awq(codes, zeros, 4)
        decoded = dequantize_gemm(words, points, scales, 4, group).t().contiguous()
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
        tensors = {"model.a.qweight": words, "model.a.qzeros": points, "model.a.scales": scales}
        name = f"{rows}x{cols}, group {group}, {dtype}"
        yield Case(name, {"quantization_config": config}, tensors, {"model.a.weight": decoded})
