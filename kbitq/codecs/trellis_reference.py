"""The codec ``trellis`` in plain numpy: slow, and meant to be read beside docs/format.md, "The codec trellis".

Conventions, and what is the same for both codecs, are in :mod:`kbitq.codecs.reference`. Here ``k`` is the number of
stored words of a block, an index has ``k + 2`` bits, and ``scale_block`` columns, 32 or 128, share a scale.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kbitq.codecs.reference import (
    F32,
    Array,
    decode_e4m4,
    encode_e4m4,
    pack_planes,
    round_to,
    tensor_exponent,
    to_blocks,
    top_byte,
    unpack_planes,
    weight_blocks,
)
from kbitq.format import BLOCK

STATES = np.arange(64)
"""What is known of the path before an element: its six latest bits, bit j is ``p[i - j]``."""

# ---------------------------------------------------------------- decoding


def rotate(bits: Array, by: int) -> Array:
    """Bits ``[..., 32]`` of a word rotated left: bit i of the result is bit ``i - by`` of the word."""
    return np.roll(bits, by, axis=-1)


def classes_of_path(p: Array) -> Array:
    """Index bits 0 to 2 of the 32 elements of each path ``p [..., 32]``."""
    bit_1 = rotate(p, 3) ^ rotate(p, 5)
    bit_2 = rotate(p, -1) ^ rotate(p, 1) ^ rotate(p, 2) ^ rotate(p, 4) ^ rotate(p, 5)
    return p | bit_1 << 1 | bit_2 << 2


def indices(packed: Array, k: int) -> Array:
    """int32 words ``[rows, nblk*k]`` -> indices uint8 ``[rows, nblk, 32]``, each of ``k + 2`` bits."""
    stored = unpack_planes(packed, k)
    return classes_of_path(stored & 1) | (stored >> 1) << 3


def dequantize(
    packed: Array, absmax: Array, codebook: Array, cols: int, dtype: str = "F32", scale_block: int = BLOCK
) -> Array:
    """``codebook[index] * decode(absmax)``, rounded once to ``dtype``: float32 ``[rows, cols]``.

    ``packed`` int32 ``[rows, nblk*k]``, ``absmax`` uint8 ``[rows, ceil(cols / scale_block)]``, ``codebook`` float32
    ``[2^(k+2)]``.
    """
    index = indices(packed, codebook.size.bit_length() - 3)
    scale = np.repeat(decode_e4m4(absmax), scale_block // BLOCK, axis=1)[:, : index.shape[1]]
    value = codebook[index] * scale[:, :, None]
    return round_to(value.reshape(len(packed), -1)[:, :cols], dtype)


# ---------------------------------------------------------------- the search for a walk


def class_of_state(state: Array) -> Array:
    """The class of an element before which the path is in ``state``, if the bit appended to it is 0.

    An appended 1 turns bit 2 over. Of state + 32, bits 1 and 2 are turned over.
    """
    bit = [(state >> j) & 1 for j in range(6)]
    return bit[0] | (bit[3] ^ bit[5]) << 1 | (bit[1] ^ bit[2] ^ bit[4] ^ bit[5]) << 2


APPENDED, OLDEST = 4, 6  # what these bits of the path turn over in a class
_FROM = STATES >> 1  # the smaller of the two states that lead to a state; the other is 32 above
_ARRIVING = class_of_state(_FROM) ^ APPENDED * (STATES & 1)  # the class of that step
_NEXT = STATES << 1 & 63  # where an appended 0 leads; a 1 leads one above
_LEAVING = class_of_state(STATES)


def class_errors(v: Array, levels: Array, s: Array, weight: Array) -> tuple[Array, Array]:
    """Error of the nearest level of each class, and which of its levels that is (the first of equals).

    ``v`` and ``weight`` are ``[n, 32]``, ``s`` is ``[n]``; both results are ``[n, 32, 8]``.
    """
    d = v[:, :, None] - (levels * s[:, None])[:, None, :]
    e = (d * d * weight[:, :, None]).reshape(*v.shape, -1, 8)
    return e.min(axis=2), e.argmin(axis=2)


def _arrive(metric: Array, e: Array) -> tuple[Array, Array]:
    return metric[:, _FROM] + e[:, _ARRIVING], metric[:, _FROM + 32] + e[:, _ARRIVING ^ OLDEST]


def best_start(e: Array) -> Array:
    """The state between two laps through which the best walk goes that need not close: ``[n]``."""
    before = after = np.zeros((len(e), 64), F32)
    for i in range(BLOCK):
        before = np.minimum(*_arrive(before, e[:, i]))
    for i in reversed(range(BLOCK)):
        after = np.minimum(after[:, _NEXT] + e[:, i, _LEAVING], after[:, _NEXT + 1] + e[:, i, _LEAVING ^ APPENDED])
    return np.argmin(before + after, axis=1)


def closed_walk(e: Array, start: Array) -> tuple[Array, Array]:
    """Error ``[n]`` of the best walk from ``start`` back to it, and its path, bits ``[n, 32]``."""
    n = np.arange(len(e))
    metric = np.where(start[:, None] == STATES, F32(0), F32(np.inf)).astype(F32)
    upper = []
    for i in range(BLOCK):
        lower_sum, upper_sum = _arrive(metric, e[:, i])
        upper.append(upper_sum < lower_sum)  # on a tie the smaller state
        metric = np.where(upper[-1], upper_sum, lower_sum)
    path, state = np.zeros((len(e), BLOCK), np.uint8), start
    for i in reversed(range(BLOCK)):
        path[:, (i + 1) % BLOCK] = state & 1
        state = state >> 1 | 32 * upper[i][n, state]
    return metric[n, start], path


# ---------------------------------------------------------------- encoding


def candidate_distances(k: int, scale_block: int) -> range:
    """Distances from ``encode(max |v|)`` that the ``mse`` rule tries."""
    narrow, wide, step = {1: (-16, -19, 2), 2: (-8, -12, 2), 3: (-3, -5, 1), 4: (-2, -3, 1)}[k]
    first = wide if scale_block > BLOCK else narrow
    return range(first, first + 6 * step, step)


def quantize(
    w: npt.ArrayLike,
    k: int,
    levels: npt.ArrayLike,
    *,
    scale: str = "mse",
    importance: npt.ArrayLike | None = None,
    dtype: str = "F32",
    scale_block: int = BLOCK,
) -> tuple[Array, Array, Array]:
    """Quantize a finite matrix.

    ``w`` float32 ``[rows, cols]``; ``levels`` float32 ``[2^(k+2)]``, ascending and normalised; ``importance`` float32
    ``[cols]`` or ``[G, cols]`` (G divides rows). Returns ``packed`` int32 ``[rows, nblk*k]``, ``absmax`` uint8
    ``[rows, ceil(cols / scale_block)]`` and the stored codebook, float32 ``[2^(k+2)]``.
    """
    w, levels = np.asarray(w, F32), np.asarray(levels, F32)
    if levels.shape != (1 << (k + 2),):
        raise ValueError(f"K={k} takes {1 << (k + 2)} levels, not an array of shape {levels.shape}")
    if scale not in ("absmax", "mse"):
        raise ValueError(f"scale must be 'absmax' or 'mse', not {scale!r}")
    x = tensor_exponent(float(np.abs(w).max(initial=0)))
    blocks = to_blocks(w * np.ldexp(F32(1), -x))
    weight = np.ones_like(blocks) if importance is None else weight_blocks(importance, *w.shape)
    inside = np.arange(blocks.shape[1] * BLOCK).reshape(-1, BLOCK) < w.shape[1]
    weight = np.where(inside, weight, F32(0))
    absmax = _choose_bytes(blocks, weight, levels, top_byte(x, dtype), scale, scale_block // BLOCK)
    index = _encode(blocks, weight, levels, absmax, scale_block // BLOCK)
    return pack_planes(index, k), absmax, np.ldexp(levels, x)


def _per_block(absmax: Array, group: int, blocks: int) -> Array:
    """Scales ``[rows, n]``, one for ``group`` blocks, as float32 ``[rows * blocks]``."""
    return np.repeat(decode_e4m4(absmax), group, axis=1)[:, :blocks].reshape(-1)


def _choose_bytes(blocks: Array, weight: Array, levels: Array, top: int, scale: str, group: int) -> Array:
    rows, nblk, _ = blocks.shape
    starts = np.arange(0, nblk, group)
    most = np.maximum.reduceat(np.abs(blocks).max(axis=-1), starts, axis=1)
    nearest = encode_e4m4(most).astype(int)
    if scale == "absmax":
        return np.minimum(nearest, top).astype(np.uint8)
    best, least = np.zeros(nearest.shape, np.uint8), np.full(nearest.shape, np.inf, F32)
    k = levels.size.bit_length() - 3
    for distance in candidate_distances(k, group * BLOCK):  # ascending: the first of equals is the smallest
        byte = np.clip(nearest + distance, 0, top).astype(np.uint8)
        s = _per_block(byte, group, nblk)
        e, _ = class_errors(blocks.reshape(-1, BLOCK), levels, s, weight.reshape(-1, BLOCK))
        of_block = closed_walk(e, best_start(e))[0].reshape(rows, nblk)
        error = np.zeros_like(least)
        for n in range(group):  # one after the other
            part = of_block[:, n::group]
            error[:, : part.shape[1]] += part
        better = error < least
        best, least = np.where(better, byte, best), np.where(better, error, least)
    return np.where(most == 0, np.uint8(0), best)


def _encode(blocks: Array, weight: Array, levels: Array, absmax: Array, group: int) -> Array:
    """What ``pack_planes`` stores of each index, ``[rows, nblk, 32]``: the path's bit, and above it bits 3 and up."""
    k = levels.size.bit_length() - 3
    s = _per_block(absmax, group, blocks.shape[1])
    e, pick = class_errors(blocks.reshape(-1, BLOCK), levels, s, weight.reshape(-1, BLOCK))
    _, path = closed_walk(e, best_start(e))
    chosen = np.take_along_axis(pick, classes_of_path(path)[:, :, None].astype(int), axis=2)[:, :, 0]
    stored = np.where(s[:, None] == 0, 1 << (k - 1), path | chosen << 1)  # a scale of 0: only the top word is set
    return stored.reshape(blocks.shape)
