"""``torch.ops.kbitq.dequantize_gguf`` and ``gguf_linear``: GGUF blocks to values, and multiplied as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kbitq._core import core
from kbitq.format.ggml_types import BY_NAME, GgmlType
from kbitq.ops import codec
from kbitq.ops.dtypes import TORCH_DTYPES
from kbitq.ops.gradients import _after_autograd, _below_autograd

FUSED_ROWS = 8
"""Rows of x up to which the blocks are multiplied as they are; above, panels of the weight are decoded."""

_VECTOR_BYTES = 16
_PANEL_BYTES = {"cpu": 1 << 23, "cuda": 1 << 28}


def dequantize(raw: Tensor, type: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of ggml's blocks: what llama.cpp and its package gguf decode them to in float32, rounded once.

    Args:
        raw: uint8 of any shape: the bytes of the blocks, a row after another.
        type: ggml's name: ``Q4_K``, ``IQ2_XXS``, ``F16``, ...
        shape: of the values; its last size is a multiple of the type's block.
        dtype: float32, bfloat16 or float16.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    return torch.ops.kbitq.dequantize_gguf(raw, type, list(shape), dtype)


def dequantize_into(raw: Tensor, type: str, out: Tensor) -> None:
    """Fill ``out`` (flat, float32, bfloat16 or float16) with the values of blocks."""
    core.decode_gguf(raw.contiguous().view(-1), _type(type).number, out, torch.get_num_threads(), codec.stream_of(raw))


def linear(x: Tensor, raw: Tensor, type: str, shape: Sequence[int]) -> Tensor:
    """y = x W^T, W given by ggml's blocks.

    Args:
        x: float32, bfloat16 or float16 ``[..., cols]``; for a stack of experts ``[E, rows, cols]``.
        raw: uint8, the bytes of W.
        type: ggml's name.
        shape: of W: ``[out, cols]``, or ``[E, out, cols]``.

    Returns:
        ``[..., out]`` or ``[E, rows, out]`` in the dtype of x, from float32 sums.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    return torch.ops.kbitq.gguf_linear(x, raw, type, list(shape))


def plain(raw: Tensor, type: str) -> Tensor:
    """Rows of bytes as rows of the elements that they are, for a type without blocks."""
    dtype = TORCH_DTYPES[type]
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.contiguous().view(dtype)


def _type(name: str) -> GgmlType:
    if (found := BY_NAME.get(name)) is None or (found.plain is not None and found.plain not in ("F32", "F16", "BF16")):
        raise ValueError(f"type: {name!r} is not a type of ggml's that is read here")
    return found


def _check(raw: Tensor, kind: GgmlType, shape: Sequence[int]) -> None:
    if raw.dtype != torch.uint8:
        raise ValueError(f"raw: is {raw.dtype}, needs uint8")
    if not shape or min(shape) < 0:
        raise ValueError(f"shape: {list(shape)} is not the shape of a tensor")
    if (size := kind.size(shape)) is None:
        raise ValueError(f"shape: rows of {shape[-1]} values are no whole blocks of {kind.name} ({kind.values} values)")
    if raw.numel() != size:
        raise ValueError(f"raw: has {raw.numel():,} bytes; {list(shape)} in {kind.name} takes {size:,}")


def _aligned(tensor: Tensor) -> Tensor:
    """A contiguous tensor that begins where a GPU can load whole vectors."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % _VECTOR_BYTES else tensor


def _decode(raw: Tensor, kind: GgmlType, out: Tensor) -> None:
    """Fill ``out`` (flat) with the values of flat, contiguous bytes."""
    if kind.plain is not None:
        out.copy_(plain(raw[None], kind.name)[0])
    else:
        core.decode_gguf(raw, kind.number, out, torch.get_num_threads(), codec.stream_of(raw))


def _dequantize(raw: Tensor, type: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    kind = _type(type)
    _check(raw, kind, shape)
    if dtype not in codec.FLOAT_DTYPES:
        raise ValueError(f"dtype: is {dtype}, needs float32, bfloat16 or float16")
    out = torch.empty(list(shape), dtype=dtype, device=raw.device)
    _decode(_aligned(raw).view(-1), kind, out.view(-1))
    return out


def _dequantize_fake(raw: Tensor, type: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    _check(raw, _type(type), shape)
    return raw.new_empty(list(shape), dtype=dtype)


def _check_linear(x: Tensor, raw: Tensor, kind: GgmlType, shape: Sequence[int]) -> None:
    _check(raw, kind, shape)
    if x.dtype not in codec.FLOAT_DTYPES:
        raise ValueError(f"x: is {x.dtype}, needs float32, bfloat16 or float16")
    if len(shape) not in (2, 3) or x.dim() < 1 or (len(shape) == 3 and (x.dim() != 3 or x.shape[0] != shape[0])):
        raise ValueError(f"shape: {list(shape)} and x {list(x.shape)} are no matrix, or no stack of experts, and its x")
    if x.shape[-1] != shape[-1]:
        raise ValueError(f"x: has {x.shape[-1]} features, the weight {shape[-1]}")
    if raw.device != x.device:
        raise ValueError(f"raw: is on {raw.device}, x on {x.device}")


def _linear(x: Tensor, raw: Tensor, type: str, shape: Sequence[int]) -> Tensor:
    kind = _type(type)
    _check_linear(x, raw, kind, shape)
    experts, (out_features, cols) = shape[0] if len(shape) == 3 else 1, shape[-2:]
    stacked = x.dim() == 3 and x.shape[0] == experts
    # Each call of torch that is left out here is a microsecond of a decode step.
    rows = _aligned(x if stacked else x.unsqueeze(0) if x.dim() == 2 else x.reshape(experts, -1, cols))
    out = x.new_empty((experts, rows.shape[1], out_features))
    flat = _aligned(raw if raw.dim() == 1 else raw.reshape(-1))
    if kind.plain is None and rows.shape[1] <= FUSED_ROWS:
        core.linear_gguf(rows, flat, kind.number, out, torch.get_num_threads(), codec.stream_of(x))
    else:
        _by_panels(rows, flat, kind, out)
    return out if stacked else out.view(*x.shape[:-1], out_features)


def _by_panels(x: Tensor, raw: Tensor, kind: GgmlType, out: Tensor) -> None:
    """Panels of rows of W, decoded into a bounded buffer and multiplied by the library."""
    experts, _, out_features = out.shape
    cols = x.shape[2]
    dtype = torch.float32 if x.device.type == "cpu" else x.dtype
    row_bytes = cols // kind.values * kind.nbytes
    step = max(1, min(out_features, _PANEL_BYTES[x.device.type] // (max(cols, 1) * dtype.itemsize)))
    buffer = torch.empty((step, cols), dtype=dtype, device=x.device)
    for expert in range(experts):
        left = x[expert].to(dtype)
        for first in range(0, out_features, step):
            count = min(step, out_features - first)
            start = (expert * out_features + first) * row_bytes
            _decode(raw[start : start + count * row_bytes], kind, buffer[:count].view(-1))
            out[expert, :, first : first + count] = left @ buffer[:count].t()


def _linear_fake(x: Tensor, raw: Tensor, type: str, shape: Sequence[int]) -> Tensor:
    _check_linear(x, raw, _type(type), shape)
    return x.new_empty((*x.shape[:-1], shape[-2]))


class _GgufLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, x: Tensor, raw: Tensor, type: str, shape: Sequence[int]) -> Tensor:
        ctx.save_for_backward(raw)
        ctx.type, ctx.shape = type, shape
        with _below_autograd():
            return torch.ops.kbitq.gguf_linear.default.redispatch(keyset & _after_autograd, x, raw, type, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (raw,) = ctx.saved_tensors
        weight = torch.ops.kbitq.dequantize_gguf(raw, ctx.type, ctx.shape, grad.dtype)
        return None, grad @ weight, None, None, None


def _linear_autograd(keyset: Any, x: Tensor, raw: Tensor, type: str, shape: Sequence[int]) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _GgufLinear.apply(keyset, x, raw, type, shape)
    with _below_autograd():
        return torch.ops.kbitq.gguf_linear.default.redispatch(keyset & _after_autograd, x, raw, type, shape)


codec.register(
    "dequantize_gguf(Tensor raw, str type, SymInt[] shape, ScalarType dtype) -> Tensor", _dequantize, _dequantize_fake
)
codec.register("gguf_linear(Tensor x, Tensor raw, str type, SymInt[] shape) -> Tensor", _linear, _linear_fake)
codec.library.impl("gguf_linear", _linear_autograd, "Autograd", with_keyset=True)
