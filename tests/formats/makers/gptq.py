"""GPTQ checkpoints by GPTQModel 7.7.0: packed and decoded by its TorchLinear."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from formats.makers.cases import Case, weights

logging.disable(logging.WARNING)
# bits, columns, rows, group (-1: one), desc_act, symmetric, version
FIXTURES = [
    (4, 128, 32, 32, False, True, 1),
    (4, 128, 64, 64, True, False, 1),
    (4, 96, 40, -1, False, False, 2),
    (2, 64, 32, 32, False, False, 1),
    (3, 128, 32, 64, True, False, 1),
    (3, 96, 64, 32, False, False, 2),
    (8, 64, 24, 32, False, False, 1),
    (8, 128, 32, 128, True, True, 2),
]
SHAPES = [
    (bits, cols, rows, group, act, sym, version)
    for bits in (2, 3, 4, 8)
    for cols, rows in ((128, 96), (384, 160), (1024, 320))
    for group in (-1, 32, 64, 128)
    for act, sym, version in ((False, True, 1), (True, False, 1), (False, False, 2), (True, True, 2))
]


def make(which: list[tuple[int, int, int, int, bool, bool, int]]) -> Iterator[Case]:
    """A case for each."""
    for seed, (bits, cols, rows, group, act, sym, version) in enumerate(which):
        kind = f"{', act order' if act else ''}{', sym' if sym else ''}, v{version}"
        name = f"{bits} bits, {rows}x{cols}, group {group}{kind}"
        yield _case(name, seed, bits, weights(rows, cols, seed), group if group > 0 else cols, act, sym, version)


def _case(name: str, seed: int, bits: int, w: Tensor, group: int, act: bool, sym: bool, version: int) -> Case:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    rows, cols = w.shape
    index = torch.arange(cols, dtype=torch.int32) // group
    if act:
        index = index[torch.randperm(cols, generator=torch.Generator().manual_seed(seed))]
    scale, zero = _grid(w, index, bits, sym)
    linear = nn.Linear(cols, rows, bias=False)
    linear.weight.data = w
    module = TorchLinear(bits, group, sym, act, cols, rows, bias=False)
    module.pack_original(linear, scale, zero, index)
    module.post_init()
    module.eval()
    decoded = module.dequantize_weight().t().contiguous()
    module.qzero_format(format=2)
    if version == 1:
        convert_gptq_v2_to_v1_format_module(module, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    tensors = {
        f"model.a.{part}": getattr(module, part).contiguous() for part in ("qweight", "qzeros", "scales", "g_idx")
    }
    quantization = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act, "sym": sym}
    if version == 2:
        quantization["checkpoint_format"] = "gptq_v2"
    return Case(name, {"quantization_config": quantization}, tensors, {"model.a.weight": decoded})


def _grid(w: Tensor, index: Tensor, bits: int, sym: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points ``[rows, groups]`` of a round to nearest."""
    most, scales, zeros = (1 << bits) - 1, [], []
    for group in range(int(index.max()) + 1):
        part = w[:, index == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if sym:
            high = torch.maximum(-low, high)
            low = -high
        scale = (high - low) / most
        zeros.append(torch.full_like(scale, 1 << (bits - 1)) if sym else (-low / scale).round().clamp(1, most))
        scales.append(scale)
    return torch.stack(scales, 1), torch.stack(zeros, 1)
