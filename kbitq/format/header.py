"""The header of a file: its tensors in order, each at its byte (docs/format.md section 2, "The file itself")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kbitq.errors import FormatError
from kbitq.format.dtypes import element_count, stored_dtype, tensor_nbytes
from kbitq.format.metadata import (
    METADATA_KEY,
    STATISTIC_WIDTH,
    ShardMeta,
    dump,
)
from kbitq.format.shapes import (
    absmax_shape,
    companion_names,
    packed_shape,
)

HEADER_ALIGN = 8


def companion_entries(name: str, shape: Sequence[int], k: int) -> list[Entry]:
    """The three stored tensors of a quantized tensor, without their place."""
    packed, absmax, codebook = companion_names(name)
    return [
        Entry(packed, "I32", packed_shape(name, shape, k)),
        Entry(absmax, "U8", absmax_shape(name, shape)),
        Entry(codebook, "F32", (1 << k,)),
    ]


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
    return dump(table)
