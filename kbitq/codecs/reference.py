"""The codec of docs/format.md in plain numpy: slow, and meant to be read beside the specification.

Everything that is fast (scalar C++, vector C++, CUDA) must give the same bytes as this file. Arithmetic is IEEE
float32 with one rounding per operation, which numpy's element-wise functions give as they stand.

A bf16 or f16 tensor is passed here as the float32 array of its (exactly widened) values, together with the name of its
dtype as safetensors spells it: "F32", "BF16" or "F16". Matrices are ``[rows, cols]``; a block is 32 consecutive
elements of a row, and the last block of a row is filled up with zeros that never count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kbitq.format import BLOCK, E4M4_BIAS, MIN_EXPONENT, block_count

Array = npt.NDArray[Any]
F32 = np.float32

#: Elements worked on at a time, so that temporaries stay in the cache whatever the matrix.
_CHUNK_BLOCKS = 2048

# ---------------------------------------------------------------- E4M4 scale byte (section 2)


def decode_e4m4(byte: npt.ArrayLike, bias: int = E4M4_BIAS) -> Array:
    """Values of scale bytes ``eeeemmmm``, float32. A ``bias`` other than 11 is for the drop-in functions only."""
    code = np.asarray(byte, np.uint8).astype(np.int32)
    exponent, mantissa = code >> 4, code & 15
    normal = np.ldexp(F32(1) + mantissa.astype(F32) / F32(16), exponent - bias)
    subnormal = np.ldexp(mantissa.astype(F32) / F32(16), 1 - bias)
    return np.where(exponent > 0, normal, subnormal).astype(F32)


def encode_e4m4(value: npt.ArrayLike, bias: int = E4M4_BIAS) -> Array:
    """The byte whose value is nearest to each non-negative float32; a tie goes to the even byte, above 31.0 is 0xFF."""
    table = decode_e4m4(np.arange(256), bias).astype(np.float64)
    midpoints = (table[:-1] + table[1:]) / 2
    value = np.asarray(value, F32).astype(np.float64)
    below = np.searchsorted(midpoints, value, side="left")  # midpoints < value
    tie = midpoints[np.minimum(below, 254)] == value
    return (below + (tie & (below % 2 == 1))).astype(np.uint8)


# ---------------------------------------------------------------- range (section 2)


def tensor_exponent(amax: float) -> int:
    """x, the power of two folded into the stored codebook: 15.5 < amax * 2^-x <= 31, but never below -100."""
    if amax == 0:
        return 0
    mantissa, exponent = np.frexp(F32(amax))
    return max(int(exponent) - (5 if mantissa <= 31 / 32 else 4), MIN_EXPONENT)


def top_byte(exponent: int, dtype: str) -> int:
    """The largest scale byte whose ``2^x * decode(byte)``, rounded to the source dtype, is finite."""
    scale = np.ldexp(decode_e4m4(np.arange(256)).astype(np.float64), exponent)
    with np.errstate(over="ignore"):
        return int(np.flatnonzero(np.isfinite(round_to(scale.astype(F32), dtype)))[-1])


def round_to(value: Array, dtype: str) -> Array:
    """float32 values rounded (to nearest, ties to even) to F32, BF16 or F16, and widened back to float32."""
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return value.astype(np.float16).astype(F32)
    if dtype == "BF16":  # add half of the dropped part, one less if the kept part is even, and cut
        bits = np.ascontiguousarray(value, F32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(value), value, rounded.view(F32))
    if dtype != "F32":
        raise ValueError(f"dtype must be F32, BF16 or F16, not {dtype!r}")
    return value


# ---------------------------------------------------------------- blocks and bit planes (section 2)


def to_blocks(w: Array) -> Array:
    """``[rows, cols]`` -> ``[rows, nblk, 32]``, zeros past the row's end."""
    rows, cols = w.shape
    nblk = block_count(cols)
    padded = np.zeros((rows, nblk * BLOCK), w.dtype)
    padded[:, :cols] = w
    return padded.reshape(rows, nblk, BLOCK)


def pack_planes(index: Array, k: int) -> Array:
    """Indices ``[rows, nblk, 32]`` -> int32 words ``[rows, nblk*k]``: bit i of word j is bit j of element i's index."""
    planes = (index.astype(np.uint8)[:, :, None, :] >> np.arange(k, dtype=np.uint8)[:, None]) & 1
    words = np.packbits(planes, axis=-1, bitorder="little").view("<u4")
    return words.astype(np.uint32).view(np.int32).reshape(index.shape[0], -1)


def unpack_planes(packed: Array, k: int) -> Array:
    """int32 words ``[rows, nblk*k]`` -> indices uint8 ``[rows, nblk, 32]``."""
    words = np.ascontiguousarray(packed).view(np.uint32).reshape(packed.shape[0], -1, k, 1)
    planes = (words >> np.arange(BLOCK, dtype=np.uint32)) & np.uint32(1)
    return (planes << np.arange(k, dtype=np.uint32)[:, None]).sum(axis=2).astype(np.uint8)


# ---------------------------------------------------------------- how values are chosen (section 3)


def find_index(v: Array, levels: Array, s: Array) -> Array:
    """Level of each element: ``index = number of j with v > mid[j] * s``, or z where ``s`` is 0.

    ``v`` is ``[n, 32]``, ``s`` is ``[n]``. The count is found by bisection: thresholds ascend with j because rounding
    keeps order.
    """
    mid = F32(0.5) * (levels[:-1] + levels[1:])
    scale = s[:, None]
    index = np.zeros(v.shape, np.intp)
    step = levels.size // 2
    while step:
        index += step * (v > mid[index + (step - 1)] * scale)
        step //= 2
    z = np.count_nonzero(mid < 0)
    return np.where(scale == 0, z, index)


def tree_sum(e: Array) -> Array:
    """Sum over the last axis of 32 in the fixed order: i+16 to i, then i+8, i+4, i+2, i+1."""
    for half in (16, 8, 4, 2, 1):
        e = e[..., :half] + e[..., half : 2 * half]
    return e[..., 0]


def block_error(v: Array, levels: Array, s: Array, valid: Array, weight: Array | None) -> Array:
    """The squared error of blocks ``v [n, 32]`` under scales ``s [n]``, weighted where ``weight [n, 32]`` is given."""
    t = v - levels[find_index(v, levels, s)] * s[:, None]
    e = t * t
    if weight is not None:
        e = e * weight
    return tree_sum(np.where(valid, e, F32(0)))


def candidate_bytes(k: int) -> range:
    """Distances from ``encode(max |v|)`` that the ``mse`` rule tries."""
    return range(-24, 5, 2) if k == 2 else range(-8, 5)


def choose_bytes(v: Array, levels: Array, top: int, scale: str, valid: Array, weight: Array | None) -> Array:
    """Scale byte of each block of ``v [n, 32]``: rule ``absmax`` or ``mse``."""
    peak = np.abs(v).max(axis=-1)
    nearest = encode_e4m4(peak).astype(int)
    if scale == "absmax":
        return np.minimum(nearest, top).astype(np.uint8)
    if scale != "mse":
        raise ValueError(f"scale must be 'absmax' or 'mse', not {scale!r}")
    best = np.zeros(len(v), np.uint8)
    least = np.full(len(v), np.inf, F32)
    for distance in candidate_bytes(levels.size.bit_length() - 1):  # ascending: the first of equals is the smallest
        byte = np.clip(nearest + distance, 0, top).astype(np.uint8)
        error = block_error(v, levels, decode_e4m4(byte), valid, weight)
        better = error < least
        best, least = np.where(better, byte, best), np.where(better, error, least)
    return np.where(peak == 0, np.uint8(0), best)


def prepare_importance(importance: npt.ArrayLike) -> Array:
    """Scaled by the power of two that brings the largest value into [1, 2)."""
    w = np.asarray(importance, F32)
    if not np.isfinite(w).all() or (w < 0).any():
        raise ValueError("importance must be finite and not negative")
    return np.ldexp(w, 1 - np.frexp(w.max(initial=0))[1]).astype(F32)


def weight_blocks(importance: npt.ArrayLike, rows: int, cols: int) -> Array:
    """``[cols]`` or ``[G, cols]`` -> ``[rows, nblk, 32]``; row r has the weights of group ``r // (rows/G)``."""
    w = prepare_importance(importance).reshape(-1, cols)
    blocks = to_blocks(np.repeat(w, rows // len(w), axis=0))
    return np.where((blocks == 0).all(axis=-1, keepdims=True), F32(1), blocks)


def quantize(
    w: npt.ArrayLike,
    k: int,
    levels: npt.ArrayLike,
    *,
    scale: str = "mse",
    importance: npt.ArrayLike | None = None,
    dtype: str = "F32",
) -> tuple[Array, Array, Array]:
    """Quantize a finite matrix.

    ``w`` float32 ``[rows, cols]``; ``levels`` float32 ``[2^k]``, ascending and normalised; ``importance`` float32
    ``[cols]`` or ``[G, cols]`` (G divides rows). Returns ``packed`` int32 ``[rows, nblk*k]``, ``absmax`` uint8
    ``[rows, nblk]`` and the stored codebook, float32 ``[2^k]``.
    """
    w = np.asarray(w, F32)
    levels = _checked_levels(levels, k)
    x = tensor_exponent(float(np.abs(w).max(initial=0)))
    v = w * np.ldexp(F32(1), -x)
    weights = None if importance is None else weight_blocks(importance, *w.shape)
    packed, absmax = _quantize_scaled(v, levels, top_byte(x, dtype), scale, weights)
    return packed, absmax, np.ldexp(levels, x)


def quantize_flat(a: npt.ArrayLike, k: int, levels: npt.ArrayLike, absmax_format: str = "e4m4") -> tuple[Array, Array]:
    """The drop-in rule (section 5) on the flattened ``a``: no range folding, scales are absolute maxima.

    Returns ``packed`` int32 ``[nblk*k]`` and ``absmax`` ``[nblk]``: uint8 (``"e4m4"``) or the exact float32 maxima
    (``"fp32"``), indices being against the scale as stored.
    """
    v = np.asarray(a, F32).reshape(1, -1)
    levels = _checked_levels(levels, k)
    if absmax_format == "e4m4":
        packed, absmax = _quantize_scaled(v, levels, 255, "absmax", None)
        return packed.reshape(-1), absmax.reshape(-1)
    blocks = to_blocks(v)
    exact = np.abs(blocks).max(axis=-1)
    index = find_index(blocks.reshape(-1, BLOCK), levels, exact.reshape(-1)).reshape(blocks.shape)
    return pack_planes(_fill_tail(index, levels, v.shape[1]), k).reshape(-1), exact.reshape(-1)


def _checked_levels(levels: npt.ArrayLike, k: int) -> Array:
    result = np.asarray(levels, F32)
    if result.shape != (1 << k,):
        raise ValueError(f"K={k} takes {1 << k} levels, not an array of shape {result.shape}")
    return result


def _fill_tail(index: Array, levels: Array, cols: int) -> Array:
    """Elements past the row's end get index z."""
    valid = np.arange(index.shape[1] * BLOCK).reshape(-1, BLOCK) < cols
    mid = F32(0.5) * (levels[:-1] + levels[1:])
    return np.where(valid, index, np.count_nonzero(mid < 0))


def _quantize_scaled(v: Array, levels: Array, top: int, scale: str, weights: Array | None) -> tuple[Array, Array]:
    """``v = W * 2^-x`` as ``[rows, cols]`` -> ``packed`` and ``absmax``."""
    k = levels.size.bit_length() - 1
    blocks = to_blocks(v)
    rows, nblk, _ = blocks.shape
    flat = blocks.reshape(-1, BLOCK)
    valid = np.tile(np.arange(nblk * BLOCK).reshape(nblk, BLOCK) < v.shape[1], (rows, 1))
    absmax = np.zeros(rows * nblk, np.uint8)
    index = np.zeros(flat.shape, np.uint8)
    for start in range(0, len(flat), _CHUNK_BLOCKS):
        part = slice(start, start + _CHUNK_BLOCKS)
        weight = None if weights is None else weights.reshape(-1, BLOCK)[part]
        absmax[part] = choose_bytes(flat[part], levels, top, scale, valid[part], weight)
        index[part] = find_index(flat[part], levels, decode_e4m4(absmax[part]))
    index = _fill_tail(index.reshape(blocks.shape), levels, v.shape[1])
    return pack_planes(index, k), absmax.reshape(rows, nblk)


# ---------------------------------------------------------------- decoding and statistics (sections 1 and 3)


def dequantize(packed: Array, absmax: Array, codebook: Array, cols: int, dtype: str = "F32") -> Array:
    """``codebook[index] * decode(absmax)``, rounded once to ``dtype``: float32 ``[rows, cols]``.

    ``packed`` int32 ``[rows, nblk*k]``; ``absmax`` ``[rows, nblk]`` uint8 (E4M4) or float32 (as it is).
    """
    k = codebook.size.bit_length() - 1
    index = unpack_planes(packed, k)
    scale = decode_e4m4(absmax) if absmax.dtype == np.uint8 else absmax
    value = codebook[index] * scale[:, :, None]
    return round_to(value.reshape(len(packed), -1)[:, :cols], dtype)


def stats(w: Array, packed: Array, absmax: Array, codebook: Array) -> Array:
    """Per row sum of w^2, sum of (w-w')^2 and max of ``|w-w'|``: float64 ``[rows, 3]``, w' not rounded to the dtype."""
    w = np.asarray(w, F32)
    difference = w.astype(np.float64) - dequantize(packed, absmax, codebook, w.shape[1]).astype(np.float64)
    squares = (to_blocks(w.astype(np.float64) ** 2), to_blocks(difference**2))
    sums = [np.add.accumulate(tree_sum(s), axis=1)[:, -1] for s in squares]  # blocks left to right
    return np.stack([*sums, np.abs(difference).max(axis=1)], axis=1)


def sqnr_db(rows: Array) -> float:
    """SQNR in dB from the rows of ``stats``, added in row order; inf for a perfect copy."""
    signal, noise, _ = np.add.accumulate(rows, axis=0)[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(10 * np.log10(np.float64(signal) / np.float64(noise)))
