"""NF4, the 4-bit NormalFloat of QLoRA, with the bytes that bitsandbytes writes for the same weights.

Blocks run on across the rows of the flattened tensor. Scales are float32, or *nested*: bytes of an 8-bit map, quantized
in blocks of 256 after their mean was taken off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kbitq.codecs.nested_scales import mean, nest, unnest
from kbitq.ops import nf4 as operators

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class NF4:
    """A tensor in NF4.

    Attributes:
        codes: uint8 ``[ceil(n / 2)]``, the first of two values in the high half.
        absmax: float32 ``[ceil(n / block)]``; uint8 if the scales are nested.
        shape: of the tensor; n is its number of elements.
        dtype: of the tensor that was quantized.
        block: values that share a scale.
        nested_absmax: float32 ``[ceil(blocks / 256)]`` or None.
        nested_offset: float32 ``[]``, the mean of the scales, or None.
    """

    codes: Tensor
    absmax: Tensor
    shape: torch.Size
    dtype: torch.dtype
    block: int = 64
    nested_absmax: Tensor | None = None
    nested_offset: Tensor | None = None

    def scales(self) -> Tensor:
        """float32 ``[ceil(n / block)]``."""
        if self.nested_absmax is None or self.nested_offset is None:
            return self.absmax
        return unnest(self.absmax, self.nested_absmax, self.nested_offset)

    def plain(self) -> NF4:
        """The same with scales that are not nested: many calls of :func:`nf4_linear` then decode them once."""
        return replace(self, absmax=self.scales(), nested_absmax=None, nested_offset=None)

    def to(self, device: torch.device | str) -> NF4:
        """The same on a device."""
        nested = [None if t is None else t.to(device) for t in (self.nested_absmax, self.nested_offset)]
        return replace(
            self,
            codes=self.codes.to(device),
            absmax=self.absmax.to(device),
            nested_absmax=nested[0],
            nested_offset=nested[1],
        )


def quantize_nf4(w: Tensor, block: int = 64, nested: bool = False) -> NF4:
    """Quantize a tensor to NF4.

    Args:
        w: float16, bfloat16 or float32 of any shape, finite.
        block: a power of two, 64 to 4096.
        nested: whether to quantize the scales too: 0.127 bits a value in place of 0.5 in blocks of 64.

    Returns:
        What bitsandbytes makes of ``w`` on a CPU, bit for bit, on whichever device ``w`` is. (The mean of nested scales
        is torch's with one thread, whose last bit may depend on the device.)

    Raises:
        ValueError: the dtype or the block is another.
    """
    if w.dtype not in _FLOATS:
        raise ValueError(f"w must be float16, bfloat16 or float32, not {w.dtype}")
    codes, scales = operators.quantize(w.detach(), block)
    q = NF4(codes, scales, w.shape, w.dtype, block)
    return _nest(q) if nested else q


def dequantize_nf4(q: NF4, dtype: torch.dtype | None = None) -> Tensor:
    """The values of ``q`` in its shape: level times scale in float32, rounded once to ``dtype`` (default: its own)."""
    scales = q.scales()
    out = operators.dequantize(q.codes, scales, q.shape.numel(), q.block, dtype or q.dtype)
    return out.view(q.shape)


def nf4_linear(x: Tensor, q: NF4, bias: Tensor | None = None) -> Tensor:
    """``x W^T (+ bias)`` with W in NF4, with gradients to ``x`` and ``bias``.

    Up to 16 rows of x (8 on CUDA) are multiplied by a kernel that decodes W in registers, provided that the block
    divides W's columns. More rows go through panels of decoded weights.

    Args:
        x: float16, bfloat16 or float32 ``[..., cols]``.
        q: of a weight ``[rows, cols]``.
        bias: ``[rows]`` in the dtype of x.

    Returns:
        ``[..., rows]`` in the dtype of x, from float32 sums.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    if len(q.shape) != 2:
        raise ValueError(f"q: must be of a matrix, not of a tensor {list(q.shape)}")
    if x.dtype not in _FLOATS:
        raise ValueError(f"x: is {x.dtype}, needs float32, bfloat16 or float16")
    return operators.linear(x, q.codes, q.scales(), q.shape[0], q.block, bias)


def _nest(q: NF4) -> NF4:
    offset = mean(q.absmax)
    codes, largest = nest(q.absmax, offset)
    return replace(q, absmax=codes, nested_absmax=largest, nested_offset=offset)
