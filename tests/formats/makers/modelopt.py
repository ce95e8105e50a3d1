"""NVFP4 by ModelOpt 0.47.0: its NVFP4QTensor quantizes and decodes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from formats.makers.cases import Case, weights

# rows, columns, dtype of the model
FIXTURES = [(16, 64, torch.bfloat16), (40, 96, torch.float16)]
SHAPES = [*FIXTURES, (320, 1024, torch.bfloat16), (96, 384, torch.float32)]


def make(which: list[tuple[int, int, torch.dtype]]) -> Iterator[Case]:
    """A case for each."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    for seed, (rows, cols, dtype) in enumerate(which):
        packed, scale, factor = NVFP4QTensor.quantize(weights(rows, cols, seed, dtype), 16)
        decoded = packed.dequantize(dtype=dtype, scale=scale, double_scale=factor, block_sizes={-1: 16})
        tensors = {
            "model.a.weight": packed._quantized_data,
            "model.a.weight_scale": scale,
            "model.a.weight_scale_2": factor.float().reshape(()),
            "model.a.input_scale": torch.ones(()),
        }
        config = {
            "torch_dtype": str(dtype).removeprefix("torch."),
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        }
        yield Case(f"{rows}x{cols}, {dtype}", config, tensors, {"model.a.weight": decoded})
