"""Experts of gpt-oss in MXFP4, decoded by transformers 5.23."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from formats.makers.cases import Case

# experts, out, in
FIXTURES = [(2, 48, 64), (3, 10, 32)]
SHAPES = [*FIXTURES, (4, 256, 512), (1, 96, 1024)]


def make(which: list[tuple[int, int, int]]) -> Iterator[Case]:
    """A case for each: all codes, and scale bytes of every size but those that a model has no use for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for seed, (experts, out, cols) in enumerate(which):
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randint(0, 256, (experts, out, cols // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(60, 190, (experts, out, cols // 32), generator=generator, dtype=torch.uint8)
        name = "model.layers.0.mlp.experts.down_proj"
        tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
        config = {"quantization_config": {"quant_method": "mxfp4"}}
        decoded = convert_moe_packed_tensors(blocks, scales)
        yield Case(f"{experts} experts, {out}x{cols}", config, tensors, {name: decoded})
