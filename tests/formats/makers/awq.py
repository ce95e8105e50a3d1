"""AWQ checkpoints by GPTQModel 7.7.0, packed and unpacked by its functions.

For GEMM's order there is a function that decodes. The other orders have only kernels for GPUs: their codes, scales
and zero points are unpacked by the functions that turn such layers into MLX's, and the values are computed as the
kernels do it: ``scale * (code - zero)``, or for ``gemv_fast`` a fused ``code * scale + zero`` in half precision.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from formats.makers.cases import Case

# layout, columns, rows, group (-1: a row), dtype of the scales
Wish = tuple[str, int, int, int, torch.dtype]
FIXTURES: list[Wish] = [
    ("gemm", 64, 32, 32, torch.float16),
    ("gemm", 128, 48, 128, torch.bfloat16),
    ("gemm", 128, 40, 64, torch.float16),
    ("gemv", 128, 64, 64, torch.float16),
    ("gemv", 256, 64, 128, torch.float16),
    ("gemv_fast", 128, 40, 64, torch.float16),
    ("gemv_fast", 64, 64, 32, torch.float16),
    ("llm-awq", 128, 24, 128, torch.float16),
]
SHAPES: list[Wish] = [
    *(
        ("gemm", cols, rows, group, dtype)
        for cols, rows in ((128, 96), (384, 160), (1024, 328))
        for group in (32, 64, 128)
        for dtype in (torch.float16, torch.bfloat16)
    ),
    *(
        (layout, cols, rows, group, torch.float16)
        for layout, groups in (("gemv", (64, 128)), ("gemv_fast", (16, 32, 64, 128, -1)), ("llm-awq", (64, 128)))
        for cols, rows in ((128, 128), (384, 192), (1024, 1024), (3072, 320))
        for group in groups
    ),
]


def make(which: list[Wish]) -> Iterator[Case]:
    """A case for each."""
    for seed, wish in enumerate(which):
        yield _gemm(seed, *wish[1:]) if wish[0] == "gemm" else _gemv(seed, *wish)


def _gemm(seed: int, cols: int, rows: int, group: int, dtype: torch.dtype) -> Case:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq

    codes, zeros, scales = _made(seed, cols, rows, group, dtype)
    words, points = pack_awq(codes.t(), zeros.t(), 4)
    scales = scales.t().contiguous()
    decoded = dequantize_gemm(words, points, scales, 4, group).t().contiguous()
    tensors = {"model.a.qweight": words, "model.a.qzeros": points, "model.a.scales": scales}
    return _case("gemm", group, tensors, decoded)


def _gemv(seed: int, layout: str, cols: int, rows: int, group: int, dtype: torch.dtype) -> Case:
    from gptqmodel.nn_modules.qlinear.gemv_awq import AwqGEMVLinear
    from gptqmodel.nn_modules.qlinear.gemv_fast_awq import AwqGEMVFastLinear, LLMAwqLinear
    from gptqmodel.utils.mlx_packing import repack_awq_gemv, repack_awq_gemv_fast

    width = cols if group == -1 else group
    codes, zeros, scales = _made(seed, cols, rows, width, dtype)
    kind = {"gemv": AwqGEMVLinear, "gemv_fast": AwqGEMVFastLinear, "llm-awq": LLMAwqLinear}[layout]
    linear = nn.Linear(cols, rows, bias=False)
    spread = [part.repeat_interleave(width, 1) for part in (zeros, scales.float())]
    linear.weight.data = (codes - spread[0]) * spread[1]
    fast = layout != "gemv"
    module = kind(4, width, False, False, cols, rows, pack_dtype=torch.int16 if fast else torch.int32)
    module.pack(linear, scales, zeros)
    named = module.zeros_name if fast else "qzeros"
    parts = {name: getattr(module, name).contiguous() for name in ("qweight", "scales", named)}
    repack = repack_awq_gemv_fast if fast else repack_awq_gemv
    words, factors, biases = repack(*(parts[name].numpy() for name in ("qweight", named, "scales")), cols, rows, width)
    found = ((words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15).reshape(rows, cols)
    assert np.array_equal(found, codes.numpy())
    wide = [np.repeat(part.astype(np.float64), width, axis=1) for part in (factors, biases)]
    decoded = torch.from_numpy((found * wide[0] + wide[1]).astype(np.float16))  # numpy rounds once, torch would twice
    return _case(layout, group, {f"model.a.{name}": part for name, part in parts.items()}, decoded)


def _made(seed: int, cols: int, rows: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[rows, cols]``, zero points and scales ``[rows, groups]``."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, cols), generator=random)
    zeros = torch.randint(0, 16, (rows, cols // group), generator=random)
    return codes, zeros, (torch.rand(rows, cols // group, generator=random) * 0.01 + 1e-3).to(dtype)


def _case(layout: str, group: int, tensors: dict[str, Tensor], decoded: Tensor) -> Case:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": layout, "zero_point": True}
    name = f"{layout}, {'x'.join(map(str, decoded.shape))}, group {group}, {tensors['model.a.scales'].dtype}"
    return Case(name, {"quantization_config": config}, tensors, {"model.a.weight": decoded})
