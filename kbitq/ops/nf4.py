"""``torch.ops.kbitq.nf4_*``: NF4 as bitsandbytes stores it, on the CPU and on CUDA (csrc/format/nf4.h)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kbitq._core import core
from kbitq.ops import panels
from kbitq.ops.codec import check_dims, check_rows, check_size, library, register, stream_of

FEW_ROWS = {"cpu": 16, "cuda": core.nf4_few_rows}
"""Rows of x up to which the kernel that decodes in registers is used; more rows go through decoded panels."""

BLOCKS = tuple(1 << n for n in range(6, 13))
"""Values that may share a scale."""

LEVELS = tuple(core.nf4_levels)
"""The 16 levels, ascending."""

_PANEL_BYTES = {"cpu": 1 << 23, "cuda": 1 << 28}


def _quantize(w: Tensor, block: int) -> tuple[Tensor, Tensor]:
    codes, scales = _fake_quantize(w, block)
    core.nf4_quantize(w.contiguous(), codes, scales, block, torch.get_num_threads(), stream_of(w))
    return codes, scales


def _check_block(block: int) -> None:
    if block not in BLOCKS:
        raise ValueError(f"block: must be a power of two from {BLOCKS[0]} to {BLOCKS[-1]}, got {block}")


def _fake_quantize(w: Tensor, block: int) -> tuple[Tensor, Tensor]:
    _check_block(block)
    count = w.numel()
    return (
        w.new_empty((count + 1) // 2, dtype=torch.uint8),
        w.new_empty((count + block - 1) // block, dtype=torch.float32),
    )


def _dequantize(codes: Tensor, scales: Tensor, count: int, block: int, dtype: torch.dtype) -> Tensor:
    out = _fake_dequantize(codes, scales, count, block, dtype)
    core.nf4_dequantize(codes, scales, out, block, torch.get_num_threads(), stream_of(codes))
    return out


def _fake_dequantize(codes: Tensor, scales: Tensor, count: int, block: int, dtype: torch.dtype) -> Tensor:
    check_dims("codes", codes, 1)
    check_size("count", count, 2 * codes.shape[0])
    _check_block(block)
    return codes.new_empty(count, dtype=dtype)


def _weight(codes: Tensor, scales: Tensor, rows: int, cols: int, block: int) -> panels.Weight:
    """For products by panels. Panels begin where a block and a byte begin."""
    step = next(step for step in (1 << n for n in range(13)) if step * cols % block == 0)

    def decode(begin: int, end: int, levels: Tensor, out: Tensor) -> None:
        first, last = begin * cols, end * cols
        own = codes[first // 2 : (last + 1) // 2], scales[first // block : (last + block - 1) // block]
        core.nf4_dequantize(*own, out.view(-1), block, torch.get_num_threads(), stream_of(out))

    return panels.Weight(rows, cols, torch.empty(0), decode, step)


def _check(x: Tensor, codes: Tensor, scales: Tensor, rows: int, block: int, name: str) -> None:
    check_rows(name, x)
    _check_block(block)
    check_size("rows", rows, 2 * codes.numel())
    count = rows * x.shape[-1]
    if codes.dim() != 1 or codes.shape[0] != (count + 1) // 2 or scales.numel() != (count + block - 1) // block:
        raise ValueError(
            f"{name}: a weight [{rows}, {x.shape[-1]}] in blocks of {block} does not match codes {list(codes.shape)} "
            f"and scales {list(scales.shape)}"
        )


def _aligned(x: Tensor) -> Tensor:
    """The same where the CUDA kernel can read it, 16 bytes at a time."""
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


def _linear(x: Tensor, codes: Tensor, scales: Tensor, rows: int, block: int, bias: Tensor | None = None) -> Tensor:
    _check(x, codes, scales, rows, block, "x")
    cols, device = x.shape[-1], x.device.type
    flat = _aligned(x.reshape(-1, cols).contiguous())
    out = x.new_empty((flat.shape[0], rows))
    if flat.shape[0] <= FEW_ROWS[device] and cols % block == 0 and codes.data_ptr() % 16 == 0:
        core.nf4_linear(flat, codes, scales, block, bias, out, torch.get_num_threads(), stream_of(x))
    else:
        weight = _weight(codes, scales, rows, cols, block)
        panels.multiply(flat, weight, bias, out, x.dtype, _PANEL_BYTES[device])
    return out.view(*x.shape[:-1], rows)


def _fake_linear(x: Tensor, codes: Tensor, scales: Tensor, rows: int, block: int, bias: Tensor | None = None) -> Tensor:
    _check(x, codes, scales, rows, block, "x")
    return x.new_empty((*x.shape[:-1], rows))


def _linear_grad(grad: Tensor, codes: Tensor, scales: Tensor, cols: int, block: int) -> Tensor:
    out, rows = _fake_linear_grad(grad, codes, scales, cols, block), grad.shape[-1]
    weight = _weight(codes, scales, rows, cols, block)
    flat = out.view(-1, cols)
    panels.multiply_transposed(grad.reshape(-1, rows), weight, flat, grad.dtype, _PANEL_BYTES[grad.device.type])
    return out


def _fake_linear_grad(grad: Tensor, codes: Tensor, scales: Tensor, cols: int, block: int) -> Tensor:
    check_rows("grad", grad)
    check_size("cols", cols, 2 * codes.numel())
    out = grad.new_empty((*grad.shape[:-1], cols))
    _check(out, codes, scales, grad.shape[-1], block, "grad")
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, scales, _, block, bias = inputs
    ctx.save_for_backward(codes, scales)
    ctx.cols, ctx.block, ctx.has_bias = x.shape[-1], block, bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    to_x = to_bias = None
    if ctx.needs_input_grad[0]:
        to_x = torch.ops.kbitq.nf4_linear_grad(grad, *ctx.saved_tensors, ctx.cols, ctx.block)
    if ctx.has_bias and ctx.needs_input_grad[5]:
        to_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return to_x, None, None, None, None, to_bias


register("nf4_quantize(Tensor w, int block) -> (Tensor, Tensor)", _quantize, _fake_quantize)
register(
    "nf4_dequantize(Tensor codes, Tensor scales, SymInt count, int block, ScalarType dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
)
register(
    "nf4_linear(Tensor x, Tensor codes, Tensor scales, SymInt rows, int block, Tensor? bias=None) -> Tensor",
    _linear,
    _fake_linear,
)
register(
    "nf4_linear_grad(Tensor grad, Tensor codes, Tensor scales, SymInt cols, int block) -> Tensor",
    _linear_grad,
    _fake_linear_grad,
)
torch.library.register_autograd("kbitq::nf4_linear", _backward, setup_context=_save, lib=library)


def quantize(w: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """``(codes, scales)`` of a finite tensor: uint8 ``[ceil(n / 2)]`` and float32 ``[ceil(n / block)]``.

    Raises ValueError for a dtype that is not a 16- or 32-bit float, or a block that is not in :data:`BLOCKS`.
    """
    return torch.ops.kbitq.nf4_quantize(w, block)


def dequantize(codes: Tensor, scales: Tensor, count: int, block: int, dtype: torch.dtype) -> Tensor:
    """``[count]``: level times scale in float32, rounded once to ``dtype``. Raises ValueError for what does not fit."""
    return torch.ops.kbitq.nf4_dequantize(codes, scales, count, block, dtype)


def linear(x: Tensor, codes: Tensor, scales: Tensor, rows: int, block: int, bias: Tensor | None = None) -> Tensor:
    """``x W^T (+ bias)`` ``[..., rows]`` in the dtype of x, with gradients to both. Raises ValueError likewise."""
    return torch.ops.kbitq.nf4_linear(x, codes, scales, rows, block, bias)
