"""K-bit blockwise quantization in the word layout of the reference implementation's first kernels.

A 32-bit word has ``floor(32 / K)`` indices, the first in its low bits; the bits above them are 0. Indices run on across
blocks and words, so a block may end within a word. Scales are absolute maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kbitq.codecs.scales import decode_absmax_e4m4, encode_absmax_e4m4
from kbitq.format import K_MAX, K_MIN
from kbitq.functional.drop_in import create_normal_float_codebook

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_BLOCKS = tuple(1 << n for n in range(5, 13))
_MAP = 256  # entries of a map in which fewer levels are padded with zeros
_CHUNK = 1 << 22  # values that are in memory as float64 at once


def pack_words(indices: Tensor, k: int) -> Tensor:
    """int32 ``[ceil(n / floor(32 / k))]`` of n indices below ``2^k``, of any integer dtype and shape."""
    per_word = 32 // _checked_k(k)
    flat = indices.reshape(-1).long()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % per_word)).view(-1, per_word)
    words = (padded << _shifts(k, flat.device)).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def unpack_words(words: Tensor, k: int, n: int) -> Tensor:
    """The first ``n`` indices, uint8, of int32 ``words`` with ``k`` bits each. ValueError if there are fewer."""
    per_word = 32 // _checked_k(k)
    if not 0 <= n <= words.numel() * per_word:
        raise ValueError(f"n={n}: {words.numel()} words have {words.numel() * per_word} indices of {k} bits")
    used = words.reshape(-1)[: -(-n // per_word)].long()
    return ((used[:, None] >> _shifts(k, words.device)) & ((1 << k) - 1)).view(-1)[:n].to(torch.uint8)


def compact_codebook(codebook: Tensor, k: int) -> Tensor:
    """The ``2^k`` levels of a codebook, float32.

    Args:
        codebook: floating, ``2^k`` levels in any order, or a map of 256 entries of which ``2^k`` are not zero (or one
            fewer: then zero is a level too); the others are padding.
        k: bits of an index, 2 to 8.

    Raises:
        ValueError: it has another number of levels, or one that is not finite.
    """
    flat, count = codebook.detach().reshape(-1).float(), 1 << _checked_k(k)
    if flat.numel() == _MAP and count < _MAP:
        levels = flat[flat != 0]
        if levels.numel() == count - 1:
            levels = torch.cat([levels[levels < 0], levels.new_zeros(1), levels[levels > 0]])
    else:
        levels = flat
    if levels.numel() != count:
        raise ValueError(f"codebook must have {count} levels for k={k}, not {levels.numel()}")
    if not bool(levels.isfinite().all()):
        raise ValueError("codebook must be finite")
    return levels


def quantize_words(
    A: Tensor,
    k: int = 4,
    block: int = 64,
    codebook: Tensor | None = None,
    absmax_format: str = "fp32",
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a tensor of any shape, flattened, in blocks under their absolute maximum.

    Args:
        A: float16, bfloat16 or float32, finite.
        k: bits of an index, 2 to 8.
        block: values that share a scale: a power of two, 32 to 4096.
        codebook: as :func:`compact_codebook` takes it; default: ``create_normal_float_codebook(k)``.
        absmax_format: ``"fp32"`` (the exact maxima) or ``"e4m4"`` (a byte; indices are against the decoded byte).
        seed: None takes the nearest level, exactly (of two that are as near, the lower). A number rounds to one of the
            two neighbours at random, each with the probability that makes the expectation the value itself; the same
            seed gives the same indices on the same kind of device.

    Returns:
        ``(words, absmax, codebook)``: int32, ``[ceil(n / block)]`` float32 or uint8, and the ``2^k`` levels.

    Raises:
        ValueError: an argument is not one of these.
    """
    if A.dtype not in _FLOATS:
        raise ValueError(f"A must be float16, bfloat16 or float32, not {A.dtype}")
    if absmax_format not in ("e4m4", "fp32"):
        raise ValueError(f"absmax_format must be 'e4m4' or 'fp32', not {absmax_format!r}")
    _check_block(block)
    levels = compact_codebook(create_normal_float_codebook(_checked_k(k)) if codebook is None else codebook, k)
    levels = levels.to(A.device)
    rows = _blocks_of(A.detach().reshape(-1), block)
    absmax = rows.abs().amax(1).float()
    stored = encode_absmax_e4m4(absmax) if absmax_format == "e4m4" else absmax
    scales = decode_absmax_e4m4(stored) if absmax_format == "e4m4" else absmax
    sorted_levels, order = levels.double().sort(stable=True)
    generator = None if seed is None else torch.Generator(A.device).manual_seed(seed)
    step = max(_CHUNK // block, 1)
    indices = [
        _indices(rows[i : i + step].double(), scales[i : i + step, None].double(), sorted_levels, generator)
        for i in range(0, rows.shape[0], step)
    ]
    chosen = torch.cat(indices) if indices else rows.long()
    return pack_words(order[chosen].view(-1)[: A.numel()], k), stored, levels


def dequantize_words(
    words: Tensor,
    absmax: Tensor,
    codebook: Tensor,
    k: int,
    n: int,
    block: int = 64,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """``[n]``: ``codebook[index] * absmax`` in float32, rounded once to ``dtype``.

    Args:
        words: int32, as :func:`quantize_words` gives them.
        absmax: float32 or uint8 (E4M4), one for each block.
        codebook: as of :func:`quantize_words`.
        k: bits of an index, 2 to 8.
        n: values wanted.
        block: values that share a scale.
        dtype: of the result: float16, bfloat16 or float32.

    Raises:
        ValueError: an argument does not fit.
    """
    _check_block(block)
    if dtype not in _FLOATS:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, not {dtype}")
    if absmax.numel() < -(-n // block):
        raise ValueError(f"n={n} in blocks of {block} takes {-(-n // block)} scales, not {absmax.numel()}")
    levels = compact_codebook(codebook, k).to(words.device)
    scales = decode_absmax_e4m4(absmax) if absmax.dtype == torch.uint8 else absmax.float()
    values = _blocks_of(levels[unpack_words(words, k, n).long()], block)
    return (values * scales[: values.shape[0], None]).view(-1)[:n].to(dtype)


def _indices(w: Tensor, scale: Tensor, levels: Tensor, generator: torch.Generator | None) -> Tensor:
    """Indices of ascending ``levels``, all float64. A product of two float32 values is exact there, so comparisons of
    ``2 w`` with ``(lower + upper) scale`` decide ties as real numbers would."""
    share = w / torch.where(scale == 0, 1.0, scale)
    if generator is not None:
        return _at_random(share, levels, generator)
    sums = levels[:-1] + levels[1:]
    i = torch.bucketize(share, sums / 2)
    last = levels.numel() - 1
    up = (i < last) & (2 * w > sums[i.clamp(max=last - 1)] * scale)
    down = (i > 0) & (2 * w <= sums[(i - 1).clamp(min=0)] * scale)
    return torch.where(scale == 0, i, i + up.long() - (down & ~up).long())


def _at_random(share: Tensor, levels: Tensor, generator: torch.Generator) -> Tensor:
    upper = torch.bucketize(share, levels).clamp(1, levels.numel() - 1)
    gap = levels[upper] - levels[upper - 1]
    part = torch.where(gap > 0, (share - levels[upper - 1]) / gap, 0.0)
    drawn = torch.rand(share.shape, generator=generator, dtype=torch.float64, device=share.device)
    return upper - 1 + (drawn < part).long()


def _blocks_of(flat: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)


def _shifts(k: int, device: torch.device) -> Tensor:
    return torch.arange(32 // k, device=device) * k


def _checked_k(k: int) -> int:
    if not K_MIN <= k <= K_MAX:
        raise ValueError(f"k must be {K_MIN}..{K_MAX}, not {k}")
    return k


def _check_block(block: int) -> None:
    if block not in _BLOCKS:
        raise ValueError(f"block must be a power of two from {_BLOCKS[0]} to {_BLOCKS[-1]}, not {block}")
