"""Checkpoints of compressed-tensors 0.20.0, by its compressors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from formats.makers.cases import Case, weights

# format, bits, strategy, group or block, symmetric, rows, columns, dtype of the scales
FIXTURES: list[tuple[Any, ...]] = [
    *(("pack-quantized", bits, "group", 32, True, 24, 64, torch.bfloat16) for bits in (2, 3, 4, 5, 6, 7, 8)),
    ("pack-quantized", 4, "group", 32, False, 40, 64, torch.float16),
    ("pack-quantized", 3, "group", 64, False, 33, 128, torch.bfloat16),
    ("pack-quantized", 4, "channel", None, True, 20, 72, torch.float32),
    ("pack-quantized", 5, "channel", None, False, 20, 50, torch.bfloat16),
    ("int-quantized", 8, "channel", None, True, 20, 64, torch.bfloat16),
    ("int-quantized", 8, "tensor", None, True, 20, 64, torch.float32),
    ("int-quantized", 8, "group", 32, False, 20, 64, torch.float16),
    ("float-quantized", 8, "tensor", None, True, 20, 64, torch.bfloat16),
    ("float-quantized", 8, "channel", None, True, 20, 64, torch.float32),
    ("float-quantized", 8, "block", [16, 32], True, 40, 80, torch.bfloat16),
    ("nvfp4-pack-quantized", 4, "tensor_group", 16, True, 16, 64, torch.float32),
    ("mxfp4-pack-quantized", 4, "group", 32, True, 16, 64, torch.bfloat16),
    ("mxfp8-quantized", 8, "group", 32, True, 16, 64, torch.bfloat16),
]
SHAPES = [
    *(
        ("pack-quantized", bits, strategy, group, sym, rows, cols, dtype)
        for bits in (1, 2, 3, 4, 5, 6, 7, 8)
        for strategy, group in (("group", 32), ("group", 128), ("channel", None))
        for sym in (True, False)
        for rows, cols in ((96, 384), (160, 1024))
        for dtype in (torch.bfloat16, torch.float16)
    ),
    *(
        (form, 8, strategy, group, True, rows, cols, dtype)
        for form in ("int-quantized", "float-quantized")
        for strategy, group in (("tensor", None), ("channel", None), ("group", 128), ("block", [128, 128]))
        for rows, cols in ((96, 384), (260, 1024))
        for dtype in (torch.bfloat16, torch.float32)
        if form == "float-quantized" or strategy != "block"
    ),
    *(
        (form, bits, strategy, group, True, rows, cols, dtype)
        for form, bits, strategy, group, dtype in (
            ("nvfp4-pack-quantized", 4, "tensor_group", 16, torch.float32),
            ("mxfp4-pack-quantized", 4, "group", 32, torch.bfloat16),
            ("mxfp8-quantized", 8, "group", 32, torch.bfloat16),
        )
        for rows, cols in ((96, 384), (160, 1024))
    ),
]


def make(which: list[tuple[Any, ...]]) -> Iterator[Case]:
    """A case for each."""
    for seed, (form, bits, strategy, group, sym, rows, cols, dtype) in enumerate(which):
        w = weights(rows, cols, seed)
        name = f"{form}, {bits} bits, {strategy} {group or ''}{'' if sym else ', asym'}, {rows}x{cols}, {dtype}"
        yield _case(name, form, bits, strategy, group, sym, w, dtype)


def _case(name: str, form: str, bits: int, strategy: str, group: Any, sym: bool, w: Tensor, dtype: torch.dtype) -> Case:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    kind = "int" if form.startswith(("pack", "int")) else "float"
    block = {"block_structure": group} if strategy == "block" else {"group_size": group} if group else {}
    extra = {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8} if form.startswith("mxfp") else {}
    args = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, symmetric=sym, **block, **extra)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    state = {
        "weight": w.to(dtype),
        **_grid(w, form, bits, group if strategy != "channel" else None, sym, dtype, strategy),
    }
    stored = compressor.compress(state, scheme)
    decoded = compressor.decompress(dict(stored), scheme)["weight"]
    tensors = {f"model.a.{key}": value.detach().contiguous() for key, value in stored.items()}
    tensors["model.a.input_scale"] = torch.ones(1)
    told = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": sym, **block}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": told}}}
    return Case(name, {"quantization_config": config}, tensors, {"model.a.weight": decoded.detach()})


def _grid(
    w: Tensor, form: str, bits: int, group: Any, sym: bool, dtype: torch.dtype, strategy: str
) -> dict[str, Tensor]:
    """Scales and zero points of a round to nearest, of the shapes that the strategies have."""
    most = {"nvfp4-pack-quantized": 6.0, "mxfp4-pack-quantized": 6.0}.get(form, 448.0)
    if form.startswith(("pack", "int")):
        most = float(max(1, (1 << (bits - 1)) - 1))
    if strategy == "block":
        tall, wide = (-(-size // by) for size, by in zip(w.shape, group, strict=True))
        padded = torch.zeros(tall * group[0], wide * group[1])
        padded[: w.shape[0], : w.shape[1]] = w
        return {"weight_scale": (padded.view(tall, group[0], wide, group[1]).abs().amax((1, 3)) / most).to(dtype)}
    rows = w.view(1, 1, -1) if strategy == "tensor" else w.view(w.shape[0], -1, group or w.shape[1])
    if not sym:
        low, high = rows.amin(-1).clamp(max=0), rows.amax(-1).clamp(min=0)
        scale = ((high - low) / ((1 << bits) - 1)).to(dtype)
        zero = (-(1 << (bits - 1)) - low / scale.float()).round().clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    scale = rows.abs().amax(-1) / most
    if form.startswith("mxfp"):
        return {"weight_scale": torch.exp2(torch.floor(torch.log2(scale))).to(dtype)}
    if form.startswith("nvfp4"):
        whole = (6 * 448) / w.abs().max().reshape(1)
        return {"weight_scale": (scale * whole).to(torch.float8_e4m3fn).float(), "weight_global_scale": whole}
    return {"weight_scale": (scale.view(1) if strategy == "tensor" else scale).to(dtype)}
