"""A hardened reader of safetensors headers: nothing in the file is believed before it was checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kbitq.errors import CheckpointError
from kbitq.format import element_count, is_shape, stored_dtype, tensor_nbytes
from kbitq.formats.base import Stored
from kbitq.text_safety import shown

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_BRACKETS = 6_000_000  # bounds what parsing may allocate; a tensor has three
MAX_DIMENSIONS = 32
MAX_ELEMENTS = 1 << 60
MAX_DTYPE_LENGTH = 32
_PICKLES = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))  # torch.save, new and old
_OTHER_KINDS = (
    (0, b"GGUF", "a GGUF file of llama.cpp"),
    (0, b"\x89HDF", "an HDF5 file of Keras"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x1f\x8b", "a gzip archive"),
)
_SAVE_AS_SAFETENSORS = "convert it to safetensors in a place you trust, for instance with transformers' save_pretrained"
_ORIGINAL = "kbitq reads safetensors: give the model that this file was made from"
_REDOWNLOAD = "download the file again, or re-save it with the safetensors library"


@dataclass(frozen=True)
class TensorRef(Stored):
    """Where a tensor lies: bytes ``[offset, offset + nbytes)`` of its file, counted from the start of the file."""

    offset: int


@dataclass(frozen=True)
class Header:
    """What the header of a file says: tensors in the order of their bytes, and its ``__metadata__``."""

    tensors: tuple[TensorRef, ...]
    metadata: Mapping[str, str]
    data_start: int


def header_length(prefix: bytes, file_size: int, where: str) -> int:
    """Length of the JSON header from a file's first 8 bytes, checked against the file's size."""
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{where} is not a safetensors file: it has only {len(prefix)} bytes", hint=_REDOWNLOAD)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        if prefix.startswith(_PICKLES):
            raise CheckpointError(
                f"{where} is a pickle, not a safetensors file; pickles can run code and are refused",
                hint=_SAVE_AS_SAFETENSORS,
            )
        if kind := _other_kind(prefix):
            raise CheckpointError(f"{where} is {kind}, not a safetensors file", hint=_ORIGINAL)
        # The first bytes of any other kind of file read as an absurd length, so both explanations are given.
        raise CheckpointError(
            f"{where} is not a safetensors file, or its header is broken: it announces {length:,} bytes of header "
            f"(the limit is {MAX_HEADER_BYTES:,})",
            hint=_REDOWNLOAD,
        )
    if LENGTH_BYTES + length > file_size:
        raise CheckpointError(
            f"{where} is truncated: its header needs {LENGTH_BYTES + length:,} bytes and the file has {file_size:,}",
            hint=_REDOWNLOAD,
        )
    return length


def _other_kind(prefix: bytes) -> str | None:
    """What a file of another kind is, by its first 8 bytes."""
    if prefix[:1] == b"\x08" and 0 < prefix[1] < 128 and prefix[2:3] in (b"\x12", b"\x1a", b"\x3a"):
        return "an ONNX model"  # a protobuf: the version of the format, then the producer or the graph
    return next((kind for at, magic, kind in _OTHER_KINDS if prefix[at:].startswith(magic)), None)


def parse_header(text: bytes, file_size: int, where: str) -> Header:
    """Parse the JSON header of a file of ``file_size`` bytes. ``where`` names the file in errors (CheckpointError)."""
    table = parse_json_object(text, f"{where}: its header")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{where}: its __metadata__ is not a table of strings", hint=_REDOWNLOAD)
    data_start = LENGTH_BYTES + len(text)
    tensors = [_tensor(name, entry, data_start, where) for name, entry in table.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes, t.name))
    _check_contiguous(tensors, data_start, file_size, where)
    return Header(tuple(tensors), metadata, data_start)


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object with unique keys and bounded nesting; ``what`` begins the sentence of a CheckpointError."""
    if text.count(b"{") + text.count(b"[") > MAX_BRACKETS:
        raise CheckpointError(f"{what} has more than {MAX_BRACKETS:,} brackets; that is no real checkpoint")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # lone surrogates could not be written again
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{what} is not valid JSON ({reason[:200]})", hint=_REDOWNLOAD) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is not a JSON object", hint=_REDOWNLOAD)
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key '{shown(twice)}' occurs twice")
    return table


def _is_offsets(value: Any) -> bool:
    return is_shape(value) and len(value) == 2 and value[0] <= value[1]


def _tensor(name: str, entry: Any, data_start: int, where: str) -> TensorRef:
    def lies(what: str) -> CheckpointError:
        return CheckpointError(f"{where}: tensor {shown(name)}: {what}", hint=_REDOWNLOAD)

    if not isinstance(entry, dict):
        raise lies("its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not dtype.isprintable() or not 0 < len(dtype) <= MAX_DTYPE_LENGTH:
        raise lies("it has no dtype")
    if not is_shape(shape) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise lies("its shape is not a list of sizes")
    if not isinstance(offsets, list) or not _is_offsets(offsets):
        raise lies("its data_offsets are not two ascending positions")
    if any(d > MAX_ELEMENTS for d in shape) or element_count(shape) > MAX_ELEMENTS:
        raise lies("its shape has more elements than a file can hold")
    nbytes = offsets[1] - offsets[0]
    expected = tensor_nbytes(dtype, shape)
    if (expected is None and stored_dtype(dtype).bits) or expected not in (None, nbytes):
        raise lies(f"{nbytes:,} bytes do not fit {dtype} elements of shape {shape}")
    return TensorRef(name, dtype, tuple(shape), nbytes, data_start + offsets[0])


def _check_contiguous(tensors: Sequence[TensorRef], data_start: int, file_size: int, where: str) -> None:
    """Tensors must follow one another without gap or overlap and fill the file exactly."""
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            fault = "overlaps the one before it" if tensor.offset < position else "leaves a gap before it"
            raise CheckpointError(f"{where}: tensor {shown(tensor.name)} {fault} (data_offsets)", hint=_REDOWNLOAD)
        position += tensor.nbytes
    if position > file_size:
        last = f"tensor {shown(tensors[-1].name)}" if tensors else "its header"
        raise CheckpointError(
            f"{where} is truncated: {last} ends at byte {position:,} and the file has {file_size:,}",
            hint=_REDOWNLOAD,
        )
    if position < file_size:
        raise CheckpointError(f"{where} has {file_size - position:,} bytes that belong to no tensor", hint=_REDOWNLOAD)
