"""A second codec, written from docs/format.md alone: it imports nothing of kbitq, and shares no code with it.

Slow and literal on purpose. What the two agree on is what the page says; where they differ, one of them misreads it.
"""

import json
import math
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

F32 = np.float32
ITEM_SIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
SCALES = np.array([2.0 ** ((b >> 4) - 11) * (1 + b % 16 / 16) if b >> 4 else 2.0**-10 * (b / 16) for b in range(256)])


class Stored(NamedTuple):
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class File(NamedTuple):
    """A safetensors file taken apart; ``header`` with its padding."""

    header: bytes
    metadata: dict
    tensors: dict[str, Stored]


def read(path: Path) -> File:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + length])
    metadata, data = entries.pop("__metadata__", {}), raw[8 + length :]
    tensors = {n: Stored(e["dtype"], tuple(e["shape"]), data[slice(*e["data_offsets"])]) for n, e in entries.items()}
    return File(raw[8 : 8 + length], metadata, tensors)


def write(path: Path, tensors: dict[str, Stored]) -> None:
    entries, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(t.data for t in tensors.values()))


def values(stored: Stored) -> np.ndarray:
    """The elements, widened or rounded to float32."""
    if stored.dtype == "BF16":
        return (np.frombuffer(stored.data, "<u2").astype("<u4") << 16).view("<f4").reshape(stored.shape)
    kind = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[stored.dtype]
    return np.frombuffer(stored.data, kind).astype(F32).reshape(stored.shape)


def stored_as(dtype: str, x: np.ndarray) -> Stored:
    """Elements rounded once to a dtype."""
    if dtype == "BF16":
        word = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
        return Stored(dtype, x.shape, ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype("<u2").tobytes())
    with np.errstate(over="ignore"):
        return Stored(dtype, x.shape, x.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype]).tobytes())


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) == 3 and "experts" in name.split("."):
        return shape[0] * shape[1], shape[2]
    return shape[0], math.prod(shape[1:])


def decode(file: File, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Section 1's rule on the triple of ``name``: float32 ``shape``."""
    codebook = np.frombuffer(file.tensors[name + "_codebook"].data, "<f4")
    k = len(codebook).bit_length() - 1
    rows, cols = matrix_shape(name, shape)
    words = np.frombuffer(file.tensors[name + "_packed"].data, "<u4").reshape(rows, -1, k)
    scale = SCALES.astype(F32)[np.frombuffer(file.tensors[name + "_absmax"].data, np.uint8)].reshape(rows, -1)
    index = np.zeros((*words.shape[:2], 32), np.int64)
    for j in range(k):
        for i in range(32):
            index[:, :, i] += (words[:, :, j] >> i & 1).astype(np.int64) << j
    return (codebook[index] * scale[:, :, None]).reshape(rows, -1)[:, :cols].reshape(shape)


def encode_scale(magnitude: np.ndarray) -> np.ndarray:
    """The nearest of the 256 scales, a tie to the even byte; float64 holds every midpoint exactly."""
    distance = np.abs(magnitude.astype(np.float64)[..., None] - SCALES)
    low = distance.argmin(-1)  # the lower of two equally near
    high = np.minimum(low + 1, 255)
    tie = (np.take_along_axis(distance, high[..., None], -1) == distance.min(-1, keepdims=True))[..., 0]
    return np.where(tie & (low % 2 == 1), high, low)


def tensor_exponent(amax: float) -> int:
    m, e = math.frexp(amax)
    return max(e - 5 if m <= 31 / 32 else e - 4, -100) if amax else 0


def top_byte(x: int, dtype: str) -> int:
    largest = {"F16": 65520.0, "BF16": 2.0**128 * (1 - 2.0**-9)}.get(dtype, 2.0**128)  # the first to round to infinity
    return int((SCALES * 2.0**x < largest).sum()) - 1


def tree_sum(e: np.ndarray) -> np.ndarray:
    for half in (16, 8, 4, 2, 1):
        e = e[..., :half] + e[..., half : 2 * half]
    return e[..., 0]


def encode(w: np.ndarray, name: str, dtype: str, levels: np.ndarray, scale: str) -> tuple[bytes, bytes, bytes]:
    """Section 3: the data of the triple, for float32 elements that came from ``dtype`` and normalised levels."""
    (rows, cols), k = matrix_shape(name, w.shape), len(levels).bit_length() - 1
    x = tensor_exponent(float(np.abs(w).max()))
    blocks = -(-cols // 32)
    v = np.zeros((rows, blocks * 32), F32)
    v[:, :cols] = w.reshape(rows, cols) * F32(2.0**-x)
    v = v.reshape(rows, blocks, 32)
    inside = (np.arange(blocks * 32) < cols).reshape(blocks, 32)
    middle = F32(0.5) * (levels[:-1] + levels[1:])
    zero = int((middle < 0).sum())

    def find(byte: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        s = SCALES.astype(F32)[byte][..., None]
        index = sum((v > m * s).astype(np.int64) for m in middle)
        return np.where((byte[..., None] > 0) & inside, index, zero), s

    amax = np.abs(v).max(-1)
    start, top = encode_scale(amax), top_byte(x, dtype)
    best, least = np.minimum(start, top), None
    steps = () if scale == "absmax" else range(-24, 5, 2) if k == 2 else range(-8, 5)
    for step in steps:
        byte = np.clip(start + step, 0, top)
        index, s = find(byte)
        t = np.where(byte[..., None] > 0, v - levels[index] * s, v)
        error = tree_sum(np.where(inside, t * t, F32(0)))
        better = True if least is None else (error < least) | ((error == least) & (byte < best))
        best, least = np.where(better, byte, best), error if least is None else np.where(better, error, least)
    best = np.where(amax == 0, 0, best)
    index, _ = find(best)
    planes = [((index >> j & 1) << np.arange(32)).sum(-1) for j in range(k)]
    stored = (levels.astype(np.float64) * 2.0**x).astype("<f4")
    return np.stack(planes, -1).astype("<u4").tobytes(), best.astype(np.uint8).tobytes(), stored.tobytes()


def statistics(w: np.ndarray, decoded: np.ndarray, name: str) -> tuple[str, str]:
    """SQNR and the largest error as the header prints them."""
    rows, cols = matrix_shape(name, w.shape)

    def total(x: np.ndarray) -> float:
        padded = np.zeros((rows, -(-cols // 32) * 32))
        padded[:, :cols] = x.reshape(rows, cols)
        per_block = tree_sum(padded.reshape(rows, -1, 32))
        return float(np.cumsum(np.cumsum(per_block, axis=1)[:, -1])[-1])  # cumsum adds strictly left to right

    error = w.astype(np.float64) - decoded.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr = 10 * np.log10(np.float64(total(w.astype(np.float64) ** 2)) / np.float64(total(error * error)))
    return tuple(f % s if math.isfinite(s) else "null" for f, s in (("%.4f", sqnr), ("%.6e", np.abs(error).max())))


def header(file: File, statistics_of: dict[str, tuple[str, str]]) -> bytes:
    """Section 2's header for the same tensors, with these statistics; other keys of the metadata as they are there."""
    kbitq = json.loads(file.metadata["kbitq"])

    def compact(value: object) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    def text(digits: str | None) -> bytes:
        lines = []
        for name, meta in kbitq["tensors"].items():
            sqnr, error = (digits, digits) if digits else statistics_of[name]
            fixed = compact({key: meta[key] for key in ("k", "shape", "dtype", "scale", "codebook")})
            lines.append(f'{compact(name)}:{fixed[:-1]},"sqnr_db":{sqnr},"max_abs_err":{error}}}')
        others = "".join(
            f",{compact(n)}:{compact(v)}" for n, v in kbitq.items() if n not in ("format_version", "tensors")
        )
        ours = f'{{"format_version":1,"tensors":{{{",".join(lines)}}}{others}}}'
        entries: dict[str, object] = {"__metadata__": {"format": "pt", "kbitq": ours}}
        offset = 0
        for name in sorted(file.tensors, key=lambda n: (-ITEM_SIZE[file.tensors[n].dtype], n)):
            dtype, shape, data = file.tensors[name]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
            offset += len(data)
        return compact(entries).encode()

    length = -(-len(text("0" * 16)) // 8) * 8
    return text(None).ljust(length)
