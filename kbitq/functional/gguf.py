"""Blocks of GGUF files: to values, and multiplied as they are. All of ggml's types that gguf-py decodes, and Q8_K."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kbitq.ops import gguf


def dequantize_gguf(
    raw: torch.Tensor, type: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values of ggml's blocks, bit for bit what llama.cpp decodes them to in float32, rounded once to ``dtype``.

    Args:
        raw: uint8 of any shape, on the CPU or a GPU: the bytes of the tensor as a GGUF file has them.
        type: ggml's name of the type: ``Q4_0``, ``Q4_K``, ``IQ2_XXS``, ``F16``, ...
        shape: of the result; its last size must be a multiple of the values of a block (32 or 256).
        dtype: float32, bfloat16 or float16.

    Returns:
        ``[*shape]`` of ``dtype``, on the device of ``raw``.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    return gguf.dequantize(raw, type, shape, dtype)


def gguf_linear(x: torch.Tensor, raw: torch.Tensor, type: str, shape: Sequence[int]) -> torch.Tensor:
    """y = x W^T with W in ggml's blocks, which are multiplied as they are where x has few rows.

    Args:
        x: float32, bfloat16 or float16 ``[..., cols]``; of a stack of experts ``[E, rows, cols]``, for each expert its
            own rows.
        raw: uint8 on the device of ``x``: the bytes of W as a GGUF file has them.
        type: ggml's name of the type.
        shape: of W: ``[out, cols]``, or ``[E, out, cols]`` for a stack of experts.

    Returns:
        ``[..., out]`` (``[E, rows, out]``) in the dtype of x, from float32 sums. It has a gradient to x.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    return gguf.linear(x, raw, type, shape)
