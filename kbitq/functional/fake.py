"""Values as they are after quantizing, for training: the gradient passes straight through, within the range."""

from __future__ import annotations

import torch
from torch import Tensor

from kbitq.codecs import codebooks
from kbitq.codecs.ranges import choose_scale, code_range, find_range
from kbitq.functional.integers import rows_of
from kbitq.ops import fake


def fake_quantize(
    x: Tensor,
    bits: int = 8,
    per: str = "tensor",
    symmetric: bool = True,
    signed: bool = True,
    group: int = 128,
    observer: str = "minmax",
    scale: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    """``x`` as integers would hold it, with the straight-through gradient masked to the range.

    Args:
        x: floating, of any shape.
        bits: of a code, 2 to 16.
        per: what shares a scale, as of ``quantize_int``.
        symmetric: as of ``quantize_int``.
        signed: as of ``quantize_int``.
        group: as of ``quantize_int``.
        observer: as of ``quantize_int``; not asked where ``scale`` is given.
        scale: of each row (``rows_of``); None finds ranges from ``x`` itself.
        zero: int32 like ``scale``; None is 0.

    Returns:
        Like ``x``. Its gradient is that of the identity where the code was not clamped, and 0 elsewhere.

    Raises:
        ValueError: an argument does not fit.
    """
    least, most = code_range(bits, signed)
    rows = rows_of(x, per, group)
    if scale is None:
        values = rows.detach() if x.dtype == torch.float64 else rows.detach().float()
        scale, zero = choose_scale(*find_range(values, observer, bits, symmetric, signed), bits, symmetric, signed)
    if scale.numel() not in (1, rows.shape[0]):
        raise ValueError(f"scale: has {scale.numel()} elements, needs 1 or {rows.shape[0]}")
    offset = torch.zeros_like(scale) if zero is None else zero
    return fake.integers(rows, scale.reshape(-1, 1), offset.reshape(-1, 1), least, most).view(x.shape)


def fake_quantize_kbit(w: Tensor, k: int = 4, codebook: str = "optimal", scale: str = "mse") -> Tensor:
    """``w`` as :func:`kbitq.quantize` with codec ``planes`` would hold it, with the straight-through gradient.

    Args:
        w: float32, bfloat16 or float16 of one or more dimensions, finite; blocks of 32 lie in rows of the last one.
        k: bits of an index, 2 to 8.
        codebook: ``"optimal"`` or ``"nf"``.
        scale: ``"mse"`` or ``"absmax"``.

    Returns:
        Like ``w``. Its gradient is that of the identity where the magnitude is within the block's range, 0 elsewhere.

    Raises:
        ValueError: an argument is not one of these.
    """
    if codebook not in ("optimal", "nf"):
        raise ValueError(f"codebook must be 'optimal' or 'nf', not {codebook!r}")
    if w.dim() == 0:
        raise ValueError("w: needs a dimension")
    levels = codebooks.optimal(k) if codebook == "optimal" else codebooks.nf(k)
    return fake.bits(w.reshape(-1, w.shape[-1]), torch.from_numpy(levels).to(w.device), scale).view(w.shape)
