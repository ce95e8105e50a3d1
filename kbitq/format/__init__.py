"""The facts of the kbitq format, version 1: names, shapes, byte counts, the header and the metadata.

Every number of the format that Python needs stands here and nowhere else (the compiled core has its own single copy in
``csrc/format``). Nothing but the standard library is imported, so that a plan or an error never waits for torch.
``docs/format.md`` is the normative text; section numbers below refer to it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kbitq.errors import FormatError

FORMAT_VERSION = 1
QUANT_METHOD = "kbitq"
SCALE_FORMAT = "e4m4"
BLOCK = 32  # elements of one row that share a scale
K_MIN, K_MAX = 2, 8
E4M4_BIAS = 11  # exponent bias of the scale byte
E4M4_MAX = 31.0  # value of byte 0xFF
MIN_EXPONENT = -100  # of the power of two folded into a codebook
MIN_LEVEL = 2.0**-12  # smaller magnitudes of a normalised codebook become 0
WORD_BYTES = 4  # one int32 word holds one bit plane of one block
CODEBOOK_ITEM_BYTES = 4  # float32 levels
SCALE_RULES = ("absmax", "mse")

PACKED_SUFFIX, ABSMAX_SUFFIX, CODEBOOK_SUFFIX = "_packed", "_absmax", "_codebook"
COMPANION_SUFFIXES = (PACKED_SUFFIX, ABSMAX_SUFFIX, CODEBOOK_SUFFIX)

METADATA_KEY = "kbitq"  # of a shard's __metadata__
CONFIG_FILE, CONFIG_KEY = "config.json", "quantization_config"
STATISTIC_WIDTH = 16  # characters reserved for each statistic in a header
HEADER_ALIGN = 8


# --- dtypes of safetensors -------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredDtype:
    """A dtype as safetensors spells it, with its bits per element: 0 and the kind ``opaque`` for one not known here."""

    name: str
    bits: int
    kind: str  # "float", "int", "bool", "complex", "opaque" (carried byte for byte, never interpreted)


_DTYPES = {
    **{n: StoredDtype(n, b, "float") for n, b in (("F64", 64), ("F32", 32), ("F16", 16), ("BF16", 16))},
    **{n: StoredDtype(n, int(n[1:]), "int") for n in ("I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8")},
    **{n: StoredDtype(n, 8, "opaque") for n in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")},
    **{n: StoredDtype(n, b, "opaque") for n, b in (("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4))},
    "BOOL": StoredDtype("BOOL", 8, "bool"),
    "C64": StoredDtype("C64", 64, "complex"),
}


def stored_dtype(name: str) -> StoredDtype:
    """The facts about a dtype; an unknown name gives an opaque dtype of 0 bits."""
    known = _DTYPES.get(name)
    return known if known is not None else StoredDtype(name, 0, "opaque")


def element_count(shape: Sequence[int]) -> int:
    """Number of elements of a tensor of this shape (1 for a scalar)."""
    return math.prod(shape)


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor, or None where the dtype is unknown or the elements do not fill whole bytes."""
    per_element = stored_dtype(dtype).bits
    bits = per_element * element_count(shape)
    return bits // 8 if per_element and bits % 8 == 0 else None


# --- shapes (section 1) ----------------------------------------------------------------------------


def is_fused_experts(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a stack of expert matrices ``[E, a, b]``: three dimensions and a component ``experts``."""
    return len(shape) == 3 and "experts" in name.split(".")


def matrix_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """The (rows, cols) that a tensor of two or more dimensions is quantized as (section 1)."""
    if len(shape) < 2:
        raise FormatError(f"tensor {name}: shape {list(shape)} is not a matrix, so it has no quantized form")
    if is_fused_experts(name, shape):
        return shape[0] * shape[1], shape[2]
    return shape[0], math.prod(shape[1:])


def block_count(cols: int) -> int:
    """Blocks in a row of ``cols`` elements; the last may be short."""
    return -(-cols // BLOCK)


def packed_shape(name: str, shape: Sequence[int], k: int) -> tuple[int, ...]:
    """Shape of ``N_packed`` (int32)."""
    rows, cols = matrix_shape(name, shape)
    lead = (shape[0], shape[1]) if is_fused_experts(name, shape) else (rows,)
    return (*lead, block_count(cols) * k)


def absmax_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of ``N_absmax`` (uint8)."""
    return packed_shape(name, shape, 1)


def shape_of_packed(name: str, k: int, packed: Sequence[int]) -> tuple[int, ...]:
    """The source shape that ``N_packed`` alone suggests: that of a matrix, or of fused experts, of whole blocks."""
    return (*packed[:-1], packed[-1] // k * BLOCK)


def quantized_nbytes(name: str, shape: Sequence[int], k: int) -> int:
    """Bytes of packed and absmax together: the numerator of "bits per weight". The codebook is counted apart."""
    rows, cols = matrix_shape(name, shape)
    return rows * block_count(cols) * (WORD_BYTES * k + 1)


def codebook_nbytes(k: int) -> int:
    """Bytes of ``N_codebook``."""
    return CODEBOOK_ITEM_BYTES << k


def companion_names(name: str) -> tuple[str, str, str]:
    """Names of the packed words, the scale bytes and the codebook of tensor ``name``."""
    return name + PACKED_SUFFIX, name + ABSMAX_SUFFIX, name + CODEBOOK_SUFFIX


def companion_entries(name: str, shape: Sequence[int], k: int) -> list[Entry]:
    """The three stored tensors of a quantized tensor, without their place."""
    packed, absmax, codebook = companion_names(name)
    return [
        Entry(packed, "I32", packed_shape(name, shape, k)),
        Entry(absmax, "U8", absmax_shape(name, shape)),
        Entry(codebook, "F32", (1 << k,)),
    ]


def k_of_codebook(name: str, shape: Sequence[int]) -> int:
    """K from the shape of ``N_codebook``. Raises FormatError when it is not ``[2^K]`` with K in 2..8."""
    k = shape[0].bit_length() - 1 if len(shape) == 1 else 0
    if not K_MIN <= k <= K_MAX or tuple(shape) != (1 << k,):
        raise FormatError(
            f"tensor {name}: codebook of shape {list(shape)} is not 2^K levels with K in {K_MIN}..{K_MAX}"
        )
    return k


def module_name(name: str) -> str:
    """The module that owns a parameter: the name without ``.weight`` (fused experts keep their whole name)."""
    return name.removesuffix(".weight")


def guard_name(quantized: Mapping[str, Sequence[int]]) -> str | None:
    """Name of a folder's guard tensor: the first (by name) quantized 2-D ``.weight``, given names and source shapes.

    The guard is an empty float32 tensor under the name of a real weight, so that a loader that ignores an unknown
    ``quant_method`` stops with a size mismatch and does not run with random weights.
    """
    return min((n for n, shape in quantized.items() if len(shape) == 2 and n.endswith(".weight")), default=None)


GUARD_DTYPE, GUARD_SHAPE = "F32", (0,)


# --- metadata of a shard (section 2) ---------------------------------------------------------------


@dataclass
class TensorMeta:
    """What a shard's metadata says of one quantized tensor. ``dtype`` in safetensors' spelling; ``sqnr_db`` in dB."""

    k: int
    shape: tuple[int, ...]
    dtype: str
    scale: str
    codebook: str
    sqnr_db: float | None = None
    max_abs_err: float | None = None
    importance: str | None = None  # SHA-256 of the importance file, where one was used


@dataclass
class ShardMeta:
    """The ``kbitq`` entry of a shard's ``__metadata__``: quantized tensors, and why the others were kept."""

    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def to_json(self, *, reserve: bool = False) -> str:
        """Compact JSON, tensors by name. ``reserve`` writes every statistic at its reserved width, for laying out."""
        tensors = ",".join(f"{_dump(n)}:{_tensor_json(self.tensors[n], reserve)}" for n in sorted(self.tensors))
        kept = f',"kept":{_dump(dict(sorted(self.kept.items())))}' if self.kept else ""
        return f'{{"format_version":{FORMAT_VERSION},"tensors":{{{tensors}}}{kept}}}'


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _statistic(value: float | None, spec: str, reserve: bool) -> str:
    if reserve:
        return "0" * STATISTIC_WIDTH
    return spec % value if value is not None and math.isfinite(value) else "null"


def _tensor_json(meta: TensorMeta, reserve: bool) -> str:
    fixed = {
        "k": meta.k,
        "shape": list(meta.shape),
        "dtype": meta.dtype,
        "scale": meta.scale,
        "codebook": meta.codebook,
    }
    sqnr = _statistic(meta.sqnr_db, "%.4f", reserve)
    error = _statistic(meta.max_abs_err, "%.6e", reserve)
    importance = f',"importance":{_dump(meta.importance)}' if meta.importance is not None else ""
    return f'{_dump(fixed)[:-1]},"sqnr_db":{sqnr},"max_abs_err":{error}{importance}}}'


def parse_shard_meta(text: str, where: str) -> ShardMeta:
    """Read the ``kbitq`` metadata of the file ``where``. Raises FormatError on a version or a shape of it not known."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the kbitq metadata is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise FormatError(f"{where}: the kbitq metadata is not a JSON object")
    check_version(raw, where)
    tensors, kept = raw.get("tensors"), raw.get("kept", {})
    if not isinstance(tensors, dict):
        raise FormatError(f"{where}: the kbitq metadata has no object 'tensors'")
    reasons = {n: r for n, r in kept.items() if isinstance(r, str)} if isinstance(kept, dict) else {}
    return ShardMeta({name: _parse_tensor_meta(name, entry, where) for name, entry in tensors.items()}, reasons)


def check_version(raw: Mapping[str, Any], where: str) -> None:
    """Raise FormatError unless ``format_version`` is the one written here."""
    version = raw.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise FormatError(
            f"{where}: format_version {version!r} is not known to this kbitq (it reads {FORMAT_VERSION})",
            hint="pip install --upgrade kbitq",
        )


def is_shape(value: Any) -> bool:
    """Whether a parsed JSON value is a list of non-negative integers."""
    return isinstance(value, list) and all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in value)


def _parse_tensor_meta(name: str, raw: Any, where: str) -> TensorMeta:
    if not isinstance(raw, dict) or not is_shape(raw.get("shape")) or not isinstance(raw.get("dtype"), str):
        raise FormatError(f"{where}: tensor {name}: its kbitq metadata lacks a shape or a dtype")
    k = raw.get("k")
    if not isinstance(k, int) or isinstance(k, bool) or not K_MIN <= k <= K_MAX:
        raise FormatError(f"{where}: tensor {name}: K = {k!r} is outside {K_MIN}..{K_MAX}")
    meta = TensorMeta(k, tuple(raw["shape"]), raw["dtype"], "unknown", "unknown")
    for key in ("scale", "codebook", "importance"):
        if isinstance(raw.get(key), str):
            setattr(meta, key, raw[key])
    for key in ("sqnr_db", "max_abs_err"):
        if isinstance(raw.get(key), float) and math.isfinite(raw[key]):
            setattr(meta, key, raw[key])
    return meta


def build_quantization_config(tensors: Mapping[str, TensorMeta], not_converted: Iterable[str]) -> dict[str, Any]:
    """``quantization_config`` of a folder's config.json, from all its quantized tensors and the modules left alone.

    ``dtypes`` is written only where tensors differ from the common dtype, since metadata may be lost on re-saving.
    """
    common_k = most_common(meta.k for meta in tensors.values())
    common_dtype = most_common(meta.dtype for meta in tensors.values())
    ordered = sorted(tensors.items())
    config: dict[str, Any] = {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "block_size": BLOCK,
        "scale_format": SCALE_FORMAT,
        "dtype": common_dtype,
        "k": common_k,
        "overrides": {module_name(n): {"k": m.k} for n, m in ordered if m.k != common_k},
        "shapes": {
            n: list(m.shape) for n, m in ordered if m.shape != shape_of_packed(n, m.k, packed_shape(n, m.shape, m.k))
        },
        "modules_to_not_convert": sorted(set(not_converted)),
    }
    if dtypes := {n: m.dtype for n, m in ordered if m.dtype != common_dtype}:
        config["dtypes"] = dtypes
    return config


def most_common(values: Iterable[Any]) -> Any:
    """The value that occurs most often; the smallest of those on a tie."""
    counts = Counter(values)
    return min(counts, key=lambda v: (-counts[v], v))


def parse_quantization_config(raw: Any, where: str) -> dict[str, Any]:
    """Check a ``quantization_config`` written by kbitq and return it. Raises FormatError."""
    if not isinstance(raw, dict) or raw.get("quant_method") != QUANT_METHOD:
        raise FormatError(f"{where}: its quantization_config is not kbitq's")
    check_version(raw, where)
    for key, value in (("block_size", BLOCK), ("scale_format", SCALE_FORMAT)):
        if raw.get(key, value) != value:
            raise FormatError(f"{where}: {key} {raw[key]!r} is not known to this kbitq (it reads {value!r})")
    shapes = raw.get("shapes", {})
    if not isinstance(shapes, dict) or not all(is_shape(s) for s in shapes.values()):
        raise FormatError(f"{where}: 'shapes' of its quantization_config is not a table of shapes")
    return raw


# --- the header of a file --------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One stored tensor. ``nbytes`` may be given for a dtype whose size is not known here."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    known_nbytes: int | None = None

    @cached_property
    def nbytes(self) -> int:
        size = tensor_nbytes(self.dtype, self.shape)
        if size is None:
            size = self.known_nbytes
        if size is None:
            raise FormatError(
                f"tensor {self.name}: the size of a {self.dtype} tensor of shape {list(self.shape)} is unknown"
            )
        return size

    @cached_property
    def element_bits(self) -> int:
        """Bits per element: of the dtype, or measured for a dtype not known here."""
        count = element_count(self.shape)
        return stored_dtype(self.dtype).bits or (self.nbytes * 8 // count if count else 0)


@dataclass(frozen=True)
class Placed:
    """A stored tensor and its bytes ``[start, end)`` of the data area."""

    entry: Entry
    start: int
    end: int


def place(entries: Iterable[Entry]) -> list[Placed]:
    """Lay tensors out in the format's order, element size descending and then name, without gaps."""
    placed, offset = [], 0
    for entry in sorted(entries, key=lambda e: (-e.element_bits, e.name)):
        placed.append(Placed(entry, offset, offset + entry.nbytes))
        offset += entry.nbytes
    return placed


def header_length(placed: Sequence[Placed], meta: ShardMeta | None, extra: Mapping[str, str] | None = None) -> int:
    """Bytes of the JSON header (padding included, the 8 bytes before it not): known before the statistics are."""
    length = len(_header_json(placed, meta, extra, reserve=True).encode())
    return -(-length // HEADER_ALIGN) * HEADER_ALIGN


def header_bytes(placed: Sequence[Placed], meta: ShardMeta | None, extra: Mapping[str, str] | None = None) -> bytes:
    """The start of a file: 8 bytes of length and the padded JSON header.

    ``meta`` None writes no kbitq metadata; ``extra`` are further strings for ``__metadata__``.
    """
    text = _header_json(placed, meta, extra, reserve=False).encode()
    length = header_length(placed, meta, extra)
    if len(text) > length:
        raise FormatError(f"a statistic is longer than the {STATISTIC_WIDTH} characters reserved for it in the header")
    return length.to_bytes(8, "little") + text.ljust(length)


def _header_json(
    placed: Sequence[Placed], meta: ShardMeta | None, extra: Mapping[str, str] | None, *, reserve: bool
) -> str:
    metadata = {"format": "pt"}
    if meta is not None:
        metadata[METADATA_KEY] = meta.to_json(reserve=reserve)
    metadata.update(extra or {})
    table: dict[str, Any] = {"__metadata__": metadata}
    for p in placed:
        table[p.entry.name] = {
            "dtype": p.entry.dtype, "shape": list(p.entry.shape), "data_offsets": [p.start, p.end],
        }  # fmt: skip
    return _dump(table)
