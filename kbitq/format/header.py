"""The header of a file: its tensors in order, each at its byte (docs/format.md section 2, "The file itself")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kbitq.errors import FormatError
from kbitq.format.dtypes import element_count, stored_dtype, tensor_nbytes
from kbitq.format.metadata import (
    METADATA_KEY,
    STATISTIC_WIDTH,
    ShardMeta,
    dump,
)

HEADER_ALIGN = 8
LENGTH_PREFIX_BYTES = 8


@dataclass(frozen=True)
class Entry:
    """One stored tensor.

    Attributes:
        name: in the file.
        dtype: in safetensors' spelling.
        shape: as the file says it.
        known_nbytes: for a dtype whose size is not known here.
    """

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
    """A stored tensor, ``entry``, and its bytes ``[start, end)`` of the data area."""

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


class HeaderText:
    """The start of a file, 8 bytes of length and the padded JSON header, built once before the statistics are known.

    Each statistic has ``STATISTIC_WIDTH`` characters reserved, so that the length does not depend on it; what is left
    over is padding at the end.

    Args:
        placed: the stored tensors.
        meta: what kbitq's metadata says of them; None writes none. All but its statistics must be known.
        extra: further strings for ``__metadata__``.
    """

    def __init__(
        self, placed: Sequence[Placed], meta: ShardMeta | None, extra: Mapping[str, str] | None = None
    ) -> None:
        self._meta = meta
        pieces = meta.json_pieces() if meta is not None else []
        self._pieces = [piece.encode() for piece in _header_pieces(placed, pieces, extra or {})]
        length = sum(map(len, self._pieces)) + STATISTIC_WIDTH * (len(self._pieces) - 1)
        self._json_nbytes = -(-length // HEADER_ALIGN) * HEADER_ALIGN

    @property
    def nbytes(self) -> int:
        return LENGTH_PREFIX_BYTES + self._json_nbytes

    def filled(self) -> bytes:
        """All ``nbytes`` bytes, with the statistics that ``meta`` has now. Raises FormatError where one is too long."""
        statistics = [text.encode() for text in self._meta.statistics()] if self._meta is not None else []
        text = b"".join(part for pair in zip(self._pieces, [*statistics, b""], strict=True) for part in pair)
        if len(text) > self._json_nbytes:
            raise FormatError(
                f"a statistic is longer than the {STATISTIC_WIDTH} characters reserved for it in the header"
            )
        return self._json_nbytes.to_bytes(LENGTH_PREFIX_BYTES, "little") + text.ljust(self._json_nbytes)


def _header_pieces(placed: Sequence[Placed], meta_pieces: Sequence[str], extra: Mapping[str, str]) -> list[str]:
    """The JSON header, cut where ``meta_pieces``, the text of kbitq's metadata, is cut."""
    # The metadata is a string in the header's JSON. A string is escaped character by character, so piece by piece too.
    escaped = [dump(piece)[1:-1] for piece in meta_pieces]
    others = "".join(f",{dump(key)}:{dump(value)}" for key, value in extra.items() if key != "format")
    table = "".join(
        f',{dump(p.entry.name)}:{{"dtype":{dump(p.entry.dtype)},"shape":{dump(list(p.entry.shape))},'
        f'"data_offsets":[{p.start},{p.end}]}}'
        for p in placed
    )
    start, end = f'{{"__metadata__":{{"format":{dump(extra.get("format", "pt"))}', f"{others}}}{table}}}"
    if not escaped:
        return [start + end]
    escaped[0] = f'{start},{dump(METADATA_KEY)}:"{escaped[0]}'
    escaped[-1] += f'"{end}'
    return escaped
