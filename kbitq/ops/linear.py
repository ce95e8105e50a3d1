"""``torch.ops.kbitq.linear``: y = x W^T (+ bias) from packed weights, on CPU and CUDA, with gradients to x and bias.

Two ways to compute, chosen by the number of rows of x: a fused kernel that decodes W in registers (few rows), or panels
of W's rows dequantized into a bounded buffer and multiplied by the library (many rows). Sums are in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kbitq import format as fmt
from kbitq._core import core
from kbitq.ops import codec, panels, tiled_linear
from kbitq.ops.gradients import Products, add_gradients, back_with_gradient, product_with_gradient

FUSED_ROWS, FUSED_ROWS_FLOAT = 16, 64
"""Rows of x up to which the CPU's fused kernel is used: where bfloat16 products are fast, and elsewhere."""

_DEFAULT = fmt.DEFAULT_CODEC
_CPU_PANEL_BYTES = 1 << 23  # stays in a cache between being decoded and being multiplied
_CUDA_PANEL_BYTES = 1 << 28  # bounds the workspace; most weights fit in one panel


def linear(
    x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, bias: Tensor | None = None, coding: str = _DEFAULT
) -> Tensor:
    """y = x W^T (+ bias), W given by its quantized triple (docs/format.md section 1).

    Args:
        x: float32, bfloat16 or float16 ``[..., cols]``; cast by autocast as for a dense layer.
        packed: int32 ``[rows, nblk * K]``.
        absmax: uint8 ``[rows, scales]``.
        codebook: float32 ``[levels]``, or ``[G, levels]`` with one codebook for each of G equal groups of rows.
        bias: ``[rows]``, cast to the dtype of x.
        coding: the codec, as in ``ops.quantize``.

    Returns:
        ``[..., rows]`` in the dtype of x, from float32 sums. For x in bfloat16 or float16, levels (in fused kernels
        that multiply in that dtype) or W (in panels, as in a dequantized model) are rounded to it first.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    x = autocast(x)
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    return torch.ops.kbitq.linear(x, packed, absmax, codebook, bias, coding)


def autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast, where it is on, wants for a linear layer."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


# --- panels ----------------------------------------------------------------------------------------


@cache
def _panel_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype to multiply in: x's own where the device multiplies it fast with float32 sums, else float32."""
    if device_type != "cpu":
        return dtype
    fast = dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("avx512_bf16", False)
    return dtype if fast else torch.float32


@cache
def fused_rows(dtype: torch.dtype) -> int:
    """Rows of x up to which the CPU's fused kernel is faster than panels (measured with a weight of 4096 x 4096)."""
    return FUSED_ROWS if _panel_dtype(dtype, "cpu") == torch.bfloat16 else FUSED_ROWS_FLOAT


def _weight(packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, coding: str) -> panels.Weight:
    def decode(begin: int, end: int, levels: Tensor, out: Tensor) -> None:
        codec.dequantize_into(packed[begin:end], absmax[begin:end], levels, out, coding)

    return panels.Weight(packed.shape[0], cols, codebook, decode)


def _panel_bytes(device: torch.device) -> int:
    return _CUDA_PANEL_BYTES if device.type == "cuda" else _CPU_PANEL_BYTES


def _linear_by_panels(
    x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, bias: Tensor | None, out: Tensor, coding: str
) -> None:
    weight, dtype = _weight(packed, absmax, codebook, x.shape[1], coding), _panel_dtype(x.dtype, x.device.type)
    panels.multiply(x, weight, bias, out, dtype, _panel_bytes(x.device))


# --- kernels ---------------------------------------------------------------------------------------


def _check_dims(x: Tensor, packed: Tensor) -> None:
    """What is read off a shape before anything else is checked."""
    codec.check_rows("x", x)
    codec.check_dims("packed", packed, 2)


def _check(x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, coding: str) -> None:
    """What the core cannot see, or would say less clearly."""
    if x.dtype not in codec.FLOAT_DTYPES:
        raise ValueError(f"x: is {x.dtype}, needs float32, bfloat16 or float16")
    if packed.dim() != 2 or codebook.dim() not in (1, 2):
        raise ValueError("packed and codebook: need [rows, nblk * K] and [levels] or [groups, levels]")
    if absmax.dtype != torch.uint8:
        raise ValueError(f"absmax: is {absmax.dtype}, needs uint8")
    k, scales = codec.bits_of(codebook, codec=coding), codec.layout_of(coding).scales(cols)
    if packed.shape[1] != fmt.block_count(cols) * k or tuple(absmax.shape) != (packed.shape[0], scales):
        raise ValueError(
            f"x: has {cols} features, which do not match packed {list(packed.shape)} "
            f"and absmax {list(absmax.shape)} at K = {k}"
        )
    if codebook.dim() == 2 and (codebook.shape[0] < 1 or packed.shape[0] % codebook.shape[0]):
        raise ValueError(f"codebook: its {codebook.shape[0]} groups must divide the {packed.shape[0]} rows of packed")


def _linear_cpu(
    x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, bias: Tensor | None = None, coding: str = _DEFAULT
) -> Tensor:
    _check_dims(x, packed)
    cols, rows = x.shape[-1], packed.shape[0]
    flat = (x if x.dim() == 2 else x.reshape(-1, cols)).contiguous()
    out = x.new_empty((flat.shape[0], rows))
    if flat.shape[0] <= fused_rows(x.dtype):
        books = codebook if codebook.dim() == 2 else codebook[None]
        core.linear(flat, packed, absmax, books, bias, out, torch.get_num_threads(), coding)
    else:
        _check(flat, packed, absmax, codebook, cols, coding)
        _linear_by_panels(flat, packed, absmax, codebook, bias, out, coding)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], rows)


def _linear_cuda(
    x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, bias: Tensor | None = None, coding: str = _DEFAULT
) -> Tensor:
    _check_dims(x, packed)
    cols, rows = x.shape[-1], packed.shape[0]
    flat = x.reshape(-1, cols)
    _check(flat, packed, absmax, codebook, cols, coding)
    out = x.new_empty((flat.shape[0], rows))
    tiles = tiled_linear.tiles_for(flat, packed, absmax, codebook, coding)
    if tiles is not None:
        tiled_linear.multiply_into(flat.contiguous(), tiles.data, tiles.codebook, bias, out, coding)
    else:
        _linear_by_panels(flat, packed, absmax, codebook, bias, out, coding)
    return out.view(*x.shape[:-1], rows)


def _linear_fake(
    x: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, bias: Tensor | None = None, coding: str = _DEFAULT
) -> Tensor:
    _check_dims(x, packed)
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


def _check_grad(grad: Tensor, packed: Tensor, absmax: Tensor, cols: int, coding: str) -> None:
    codec.check_rows("grad", grad)
    codec.check_dims("packed", packed, 2)
    if grad.shape[-1] != packed.shape[0]:
        raise ValueError(f"grad: has {grad.shape[-1]} features, which are not the {packed.shape[0]} rows of packed")
    codec.check_size("cols", cols, codec.cols_limit(absmax, coding))


def _linear_grad(
    grad: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, coding: str = _DEFAULT
) -> Tensor:
    _check_grad(grad, packed, absmax, cols, coding)
    flat = grad.reshape(-1, grad.shape[-1])
    _check(flat, packed, absmax, codebook, cols, coding)
    out = grad.new_empty((flat.shape[0], cols))
    weight, dtype = _weight(packed, absmax, codebook, cols, coding), _panel_dtype(grad.dtype, grad.device.type)
    panels.multiply_transposed(flat, weight, out, dtype, _panel_bytes(grad.device))
    return out.view(*grad.shape[:-1], cols)


def _linear_grad_fake(
    grad: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, coding: str = _DEFAULT
) -> Tensor:
    _check_grad(grad, packed, absmax, cols, coding)
    return grad.new_empty((*grad.shape[:-1], cols))


# --- gradients -------------------------------------------------------------------------------------

_PAIR = Products("linear", "linear_grad")


def _linear_autograd(
    keyset: Any,
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    codebook: Tensor,
    bias: Tensor | None = None,
    coding: str = _DEFAULT,
) -> Tensor:
    return product_with_gradient(keyset, _PAIR, x, (packed, absmax, codebook), bias, -1, coding)


def _linear_grad_autograd(
    keyset: Any, grad: Tensor, packed: Tensor, absmax: Tensor, codebook: Tensor, cols: int, coding: str = _DEFAULT
) -> Tensor:
    return back_with_gradient(keyset, _PAIR, grad, (packed, absmax, codebook), cols, coding)


codec.register(
    "linear(Tensor x, Tensor packed, Tensor absmax, Tensor codebook, Tensor? bias=None, str coding='planes') -> Tensor",
    _linear_cpu,
    _linear_fake,
    ("CPU",),
)
codec.library.impl("linear", _linear_cuda, "CUDA")
codec.register(
    "linear_grad(Tensor grad, Tensor packed, Tensor absmax, Tensor codebook, SymInt cols, "
    "str coding='planes') -> Tensor",
    _linear_grad,
    _linear_grad_fake,
)
add_gradients(_PAIR, _linear_autograd, _linear_grad_autograd)
