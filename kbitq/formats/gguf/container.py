"""A hardened reader of GGUF's container, versions 2 and 3: metadata and where tensors lie. Imports no torch.

Nothing in the file is believed before it was checked; no tensor data is read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kbitq.errors import CheckpointError
from kbitq.format.ggml_types import BY_NUMBER, GgmlType
from kbitq.text_safety import shown

MAGIC = b"GGUF"
SUFFIX = ".gguf"
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Far more than a real file has, and as much as may be held: Python's objects take many times the bytes of the file.
MAX_HEADER_BYTES = 256 << 20
MAX_TENSORS = 1 << 18
MAX_ENTRIES = 1 << 16
MAX_ITEMS = 1 << 24  # of all arrays together
MAX_TEXT_BYTES = 16 << 20
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 512
MAX_ELEMENTS = 1 << 60
_STEP = 1 << 20
_DEFAULT_ALIGNMENT = 32
_LEAST_ENTRY_BYTES = 13  # of a metadata entry: a name's length, a type, a value
_LEAST_TENSOR_BYTES = 33
_REDOWNLOAD = "download the file again"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Bytes(Protocol):
    """An open file."""

    where: str
    size: int

    def read_into(self, buffer: memoryview, offset: int) -> None: ...


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: ``shape`` as numpy has it (ggml's turned round), ``offset`` from the start of the file."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """What a file says: ``metadata`` by key (lists for arrays) and its tensors in the order of their bytes."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    data_start: int


class _Cursor:
    """Reads fields one after another; bytes of the file come in as they are needed."""

    def __init__(self, file: Bytes) -> None:
        self._file, self._limit = file, min(file.size, MAX_HEADER_BYTES)
        self._buffer = bytearray()
        self.position = 0
        self.items = 0  # of the arrays read so far

    def lies(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file.where}: {what}", hint=_REDOWNLOAD)

    def left(self) -> int:
        return self._limit - self.position

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > self._limit:
            raise self.lies(f"its header ends before byte {end:,}, where a field of it should")
        if end > len(self._buffer):
            begin = len(self._buffer)
            more = bytearray(min(self._limit, max(end, begin + _STEP)) - begin)
            self._file.read_into(memoryview(more), begin)
            self._buffer += more
        view = memoryview(self._buffer)[self.position : end]
        self.position = end
        return view

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self, limit: int = MAX_TEXT_BYTES) -> bytes:
        length = self.number("Q")
        if length > min(self.left(), limit):
            raise self.lies(f"a string of its header has {length:,} bytes")
        return bytes(self.take(length))

    def name(self) -> str:
        raw = self.string(MAX_NAME_BYTES)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            name = ""
        if not name or not name.isprintable():
            raise self.lies(f"a name of its header is not printable text: {shown(repr(raw))}")
        return name


def read_gguf(file: Bytes) -> GgufFile:
    """Read and check the header of one GGUF file. Raises CheckpointError."""
    cursor = _Cursor(file)
    _check_start(cursor, file)
    tensor_count, entry_count = cursor.number("Q"), cursor.number("Q")
    if (
        tensor_count > MAX_TENSORS
        or entry_count > MAX_ENTRIES
        or tensor_count * _LEAST_TENSOR_BYTES + entry_count * _LEAST_ENTRY_BYTES > cursor.left()
    ):
        raise cursor.lies(f"it announces {tensor_count:,} tensors and {entry_count:,} entries, more than it can hold")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.name()
        if key in metadata:
            raise cursor.lies(f"the key '{shown(key)}' occurs twice")
        metadata[key] = _value(cursor, key, cursor.number("I"))
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = _alignment(cursor, metadata)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = [_placed(cursor, entry, data_start, alignment) for entry in entries]
    return GgufFile(metadata, _checked(cursor, tensors, file.size), data_start)


def _check_start(cursor: _Cursor, file: Bytes) -> None:
    if file.size < 24 or bytes(cursor.take(4)) != MAGIC:
        raise CheckpointError(f"{file.where} is not a GGUF file", hint=_REDOWNLOAD)
    version = cursor.number("I")
    if version in (2, 3):
        return
    turned = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
    kind = "for machines of the other byte order" if turned else f"of version {version:,}"
    raise CheckpointError(
        f"{file.where} is a GGUF file {kind}; versions 2 and 3 are read", hint="convert it with llama.cpp's newer tools"
    )


def _value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == _STRING:
        return _text(cursor.string())
    if kind in _SCALARS:
        return _scalar(cursor, key, kind)
    if kind != _ARRAY:
        raise cursor.lies(f"'{shown(key)}' has a type that is not known ({kind})")
    item, count = cursor.number("I"), cursor.number("Q")
    code = _SCALARS.get(item)
    least = 8 if item == _STRING else struct.calcsize("<" + code) if code else 0
    if not least:
        raise cursor.lies(f"'{shown(key)}' is an array of a type that is not read ({item})")
    cursor.items += count
    if cursor.items > MAX_ITEMS or count * least > cursor.left():
        raise cursor.lies(f"'{shown(key)}' is an array of {count:,} items, more than it can hold")
    if code is None:
        return [_text(cursor.string()) for _ in range(count)]
    return list(struct.unpack(f"<{count}{code}", cursor.take(count * least)))


def _scalar(cursor: _Cursor, key: str, kind: int) -> Any:
    value = cursor.number(_SCALARS[kind])
    if isinstance(value, float) and not math.isfinite(value):
        raise cursor.lies(f"'{shown(key)}' is not a finite number")
    return value


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _tensor_entry(cursor: _Cursor) -> tuple[str, GgmlType, tuple[int, ...], int]:
    """Name, type, shape and offset (in the data) of a tensor."""
    name = cursor.name()
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.lies(f"tensor {shown(name)} has {dimensions:,} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    if min(shape) < 1 or max(shape) > MAX_ELEMENTS or math.prod(shape) > MAX_ELEMENTS:
        raise cursor.lies(f"tensor {shown(name)} has a shape that no file can hold: {list(shape)}")
    if (kind := BY_NUMBER.get(number)) is None:
        raise CheckpointError(
            f"{cursor._file.where}: tensor {shown(name)} is of ggml's type {number}, which is not read here",
            hint="take a GGUF file of another type, or the original model",
        )
    return name, kind, shape, offset


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= _STEP or alignment & (alignment - 1):
        raise cursor.lies(f"its alignment is not a power of two: {shown(str(alignment))}")
    return alignment


def _placed(
    cursor: _Cursor, entry: tuple[str, GgmlType, tuple[int, ...], int], data_start: int, alignment: int
) -> GgufTensor:
    name, kind, shape, offset = entry
    if (nbytes := kind.size(shape)) is None:
        raise cursor.lies(f"tensor {shown(name)}: rows of {shape[-1]:,} values are no whole blocks of {kind.name}")
    if offset % alignment:
        raise cursor.lies(f"tensor {shown(name)} begins at {offset:,}, which is no multiple of {alignment}")
    return GgufTensor(name, kind, shape, data_start + offset, nbytes)


def _checked(cursor: _Cursor, tensors: list[GgufTensor], size: int) -> tuple[GgufTensor, ...]:
    """The tensors in the order of their bytes: no name twice, none over another, none past the end."""
    tensors.sort(key=lambda t: (t.offset, t.nbytes, t.name))
    names: set[str] = set()
    position = 0
    for tensor in tensors:
        if tensor.name in names:
            raise cursor.lies(f"tensor {shown(tensor.name)} occurs twice")
        if tensor.offset < position:
            raise cursor.lies(f"tensor {shown(tensor.name)} overlaps the one before it")
        names.add(tensor.name)
        position = tensor.offset + tensor.nbytes
    if position > size:
        raise cursor.lies(
            f"it is truncated: tensor {shown(tensors[-1].name)} ends at byte {position:,} and the file has {size:,}"
        )
    return tuple(tensors)


def integer(metadata: Mapping[str, Any], key: str, least: int = 1, most: int = 1 << 31) -> int | None:
    """An integer of the metadata within bounds, else None. Of an array whose items are equal, that item."""
    value = metadata.get(key)
    if isinstance(value, list) and value and all(v == value[0] for v in value):
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most else None
