"""Drop-in functions with the names and calling conventions of the reference implementation (docs/format.md section 5).

They work on a flattened tensor in blocks of 32 and know nothing of shapes, ranges or checkpoints: the codebook is used
as given, scales are absolute maxima, and E4M4 scales saturate at 31. For anything new use ``kbitq.quantize``, which
folds the tensor's range into the codebook and searches for the best scale. Everything runs on the device of its input.
"""

from __future__ import annotations

import torch

from kbitq import ops
from kbitq.codecs import codebooks
from kbitq.codecs.scales import decode_absmax_e4m4, encode_absmax_e4m4
from kbitq.format import BLOCK, K_MAX, K_MIN, block_count

__all__ = [
    "create_normal_float_codebook",
    "decode_absmax_e4m4",
    "dequantize_kbit",
    "encode_absmax_e4m4",
    "quantize_kbit",
]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def create_normal_float_codebook(k: int, device: torch.device | str | None = None) -> torch.Tensor:
    """NormalFloat codebook: the normal quantiles of ``(i + 0.5) / 2^k`` divided by the largest.

    Returns float32 ``[2^k]``, ascending, in [-1, 1], on ``device`` (default: the CPU). ValueError unless k is 2..8.
    """
    return torch.from_numpy(codebooks.nf(k)).to(device or "cpu")


def quantize_kbit(
    A: torch.Tensor,
    k: int = 4,
    codebook: torch.Tensor | None = None,
    absmax_format: str = "e4m4",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a tensor of any shape, flattened, in blocks of 32 under their absolute maximum.

    ``A`` float16, bfloat16 or float32, finite; ``codebook`` float32 ``[2^k]``, ascending (equal neighbours and
    one-sided sets are fine), by default ``create_normal_float_codebook(k)``; ``absmax_format`` ``"e4m4"`` (one byte a
    block; indices are against the decoded byte) or ``"fp32"`` (the exact maxima).

    Returns ``packed`` int32 ``[ceil(n/32) * k]``, ``absmax`` ``[ceil(n/32)]`` uint8 or float32, and the codebook
    unchanged. Raises ValueError for an unknown format, K, dtype or a codebook that does not fit.
    """
    if absmax_format not in ("e4m4", "fp32"):
        raise ValueError(f"absmax_format must be 'e4m4' or 'fp32', not {absmax_format!r}")
    if A.dtype not in _FLOATS:
        raise ValueError(f"A must be float16, bfloat16 or float32, not {A.dtype}")
    if codebook is None:
        codebook = create_normal_float_codebook(k, A.device)
    codebook = _checked_codebook(codebook, k, A.device)
    flat = A.detach().reshape(1, -1).contiguous()
    nblk = block_count(flat.shape[1])
    packed = torch.empty((1, nblk * k), dtype=torch.int32, device=A.device)
    absmax = torch.empty((1, nblk), dtype=torch.uint8 if absmax_format == "e4m4" else torch.float32, device=A.device)
    ops.quantize_into(flat, codebook, packed, absmax, None, amax=None, scale="absmax")
    return packed.reshape(-1), absmax.reshape(-1), codebook


def dequantize_kbit(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    k: int,
    n: int,
    dtype: torch.dtype = torch.float16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first ``n`` values of what ``quantize_kbit`` packed: ``codebook[index] * absmax``, rounded once to ``dtype``.

    Args:
        packed: int32, as ``quantize_kbit`` returned it.
        absmax: uint8 (E4M4) or float32, used in the precision it has.
        codebook: float32 ``[2^k]``.
        k: bits of an index, 2 to 8.
        n: values wanted.
        dtype: of the result: float16, bfloat16 or float32.
        out: of ``dtype`` and at least ``ceil(n/32) * 32`` elements; it is written in place (no allocation, so the call
            can be captured in a CUDA graph).

    Returns:
        ``[n]``: a view of ``out`` where it was given.

    Raises:
        ValueError: ``out`` or another argument does not fit.
    """
    if dtype not in _FLOATS:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, not {dtype}")
    if absmax.dtype not in (torch.uint8, torch.float32):
        raise ValueError(f"absmax must be uint8 (E4M4) or float32, not {absmax.dtype}")
    codebook = _checked_codebook(codebook, k, packed.device)
    if n < 0:
        raise ValueError(f"n must not be negative, not {n}")
    nblk = block_count(n)
    if packed.numel() < nblk * k or absmax.numel() < nblk:
        have = f"{packed.numel()} and {absmax.numel()}"
        raise ValueError(f"n={n} at k={k} takes {nblk * k} packed words and {nblk} scales, not {have}")
    target = None if out is None else _checked_out(out, dtype, n).view(-1)[:n].view(1, n)
    words, scales = packed.reshape(-1)[: nblk * k].view(1, -1), absmax.reshape(-1)[:nblk].view(1, -1)
    return ops.dequantize(words.contiguous(), scales.contiguous(), codebook, n, dtype, out=target).view(-1)


def _checked_codebook(codebook: torch.Tensor, k: int, device: torch.device) -> torch.Tensor:
    """The codebook as the core takes it: float32 ``[2^k]`` on ``device``. Its order is checked where that is free."""
    if not K_MIN <= k <= K_MAX:
        raise ValueError(f"k must be {K_MIN}..{K_MAX}, not {k}")
    if codebook.numel() != 2**k or codebook.dtype != torch.float32:
        have = f"{codebook.dtype} with {codebook.numel()}"
        raise ValueError(f"codebook must be float32 with {2**k} entries for k={k}, not {have}")
    if codebook.device.type == "cpu" and bool((codebook.diff() < 0).any()):  # on a GPU this would wait for the device
        raise ValueError("codebook must be ascending")
    return codebook.to(device).contiguous()


def _checked_out(out: torch.Tensor, dtype: torch.dtype, n: int) -> torch.Tensor:
    if out.dtype != dtype:
        raise ValueError(f"out's dtype {out.dtype} does not match dtype {dtype}")
    if out.numel() < block_count(n) * BLOCK:
        raise ValueError(f"out has {out.numel()} elements, need at least {block_count(n) * BLOCK} for n={n}")
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")
    return out
