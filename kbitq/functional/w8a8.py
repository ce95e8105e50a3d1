"""Products of 8-bit integers: activations quantized as they come, a scale a token; and SmoothQuant's scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kbitq.functional.integers import IntTensor, quantize_int

_CUDA_ROWS, _CUDA_MULTIPLE = 17, 8  # what the library's product asks for: more than 16 rows, and sizes


class HasDiagonal(Protocol):
    """What ``kbitq calibrate`` found of one input: ``Statistics.open(folder)[name]``."""

    @property
    def tokens(self) -> int: ...

    def diagonal(self) -> Tensor: ...


def linear_w8a8(x: Tensor, weight: IntTensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T (+ bias)`` with both sides in signed 8-bit integers and sums in int32, which are exact.

    Each row of x gets a scale of its own, its largest magnitude over 127.

    Args:
        x: float32, bfloat16 or float16 ``[..., cols]``, finite.
        weight: ``quantize_int(w)`` of a matrix ``[rows, cols]``: signed, symmetric, 8 bits, per channel or tensor.
        bias: ``[rows]``.

    Returns:
        ``[..., rows]`` in the dtype of x.

    Raises:
        ValueError: an argument is another.
    """
    if weight.bits != 8 or weight.zero is not None or weight.per not in ("channel", "tensor") or len(weight.shape) != 2:
        raise ValueError("weight: must be a matrix in signed symmetric 8-bit integers, per channel or per tensor")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x: has shape {list(x.shape)}, needs [..., {weight.shape[1]}]")
    flat = quantize_int(x.reshape(-1, x.shape[-1]), per="token")
    sums = int8_matmul(flat.codes, weight.codes)
    y = sums.float() * flat.scale[:, None] * weight.scale.float()[None, :]
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """int32 ``a b^T`` of int8 ``[M, cols]`` and ``[N, cols]``, exact, by the library's product.

    On CUDA the sizes that it does not take are filled up with zeros.
    """
    if not a.is_cuda:
        return torch._int_mm(a.contiguous(), b.t())
    rows, cols, out = a.shape[0], a.shape[1], b.shape[0]
    wide = -cols % _CUDA_MULTIPLE
    left = torch.nn.functional.pad(a, (0, wide, 0, max(_CUDA_ROWS - rows, 0)))
    right = torch.nn.functional.pad(b, (0, wide, 0, -out % _CUDA_MULTIPLE))
    return torch._int_mm(left.contiguous(), right.contiguous().t())[:rows, :out]


def smooth_scales(activations: Tensor | HasDiagonal, weights: Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """SmoothQuant's scales (Xiao 2022): ``s_j = a_j^alpha / max|W_j|^(1 - alpha)``, by input column.

    Args:
        activations: the magnitude of each column, ``[cols]``: maxima, or what ``kbitq calibrate`` found, whose root
            mean square is taken (it keeps sums of squares, not maxima).
        weights: the matrices ``[rows, cols]`` that read this input; they share the scales.
        alpha: how much of the difficulty goes to the weights, 0 to 1.

    Returns:
        float32 ``[cols]``, positive: ``fold_smooth`` multiplies the weights by it and divides what feeds them.

    Raises:
        ValueError: shapes differ, or alpha is another.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be 0 to 1, not {alpha}")
    if isinstance(activations, Tensor):
        size = activations.float()
    else:
        size = (activations.diagonal().float() / max(activations.tokens, 1)).sqrt()
    if size.dim() != 1 or not weights or any(w.dim() != 2 or w.shape[1] != size.shape[0] for w in weights):
        raise ValueError(f"weights: need matrices of {list(size.shape)} columns")
    largest = torch.stack([w.detach().float().abs().amax(0) for w in weights]).amax(0)
    tiny = torch.finfo(torch.float32).tiny
    scales = size.to(largest.device).clamp(min=tiny) ** alpha / largest.clamp(min=tiny) ** (1 - alpha)
    dead = (largest <= tiny) | (size.to(largest.device) <= tiny)
    return torch.where(dead, torch.ones_like(scales), scales)


@torch.no_grad()
def fold_smooth(scales: Tensor, linears: Sequence[torch.nn.Module], before: torch.nn.Module) -> None:
    """Fold :func:`smooth_scales` into a model, whose outputs stay as they are but for rounding.

    Args:
        scales: ``[cols]``.
        linears: layers whose ``weight`` is ``[rows, cols]``; it is multiplied by the scales.
        before: the layer that makes their input (a norm, or a linear layer with ``cols`` rows); its ``weight``, and its
            ``bias`` if it has one, are divided by them.

    Raises:
        ValueError: a shape does not fit; nothing is changed then.
    """
    source = [p for p in (before.weight, getattr(before, "bias", None)) if isinstance(p, Tensor)]
    count = scales.numel()
    if any(p.shape[0] != count for p in source):
        raise ValueError(f"before: has parameters {[list(p.shape) for p in source]}, needs [{count}, ...]")
    targets = [layer.weight for layer in linears]
    if any(not isinstance(w, Tensor) or w.dim() != 2 or w.shape[1] != count for w in targets):
        raise ValueError(f"linears: need weights of {count} columns")
    for weight in targets:
        if isinstance(weight, Tensor):
            weight.copy_((weight.float() * scales.to(weight.device)).to(weight.dtype))
    for parameter in source:
        factor = scales.to(parameter.device).view(-1, *[1] * (parameter.dim() - 1))
        parameter.copy_((parameter.float() / factor).to(parameter.dtype))
