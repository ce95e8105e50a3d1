"""Opening a checkpoint: which files hold its weights, what their headers say, and that they agree with the index."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kbitq.checkpoint.source.gguf_storage import GgufStorage, as_gguf
from kbitq.checkpoint.source.header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Header,
    TensorRef,
    header_length,
    parse_header,
    parse_json_object,
)
from kbitq.checkpoint.source.side_files import INDEX_SUFFIX, WEIGHTS_SUFFIX, is_duplicate_weights, sort_files
from kbitq.checkpoint.source.storage import Fingerprint, Storage, open_storage, read_all
from kbitq.errors import CheckpointError
from kbitq.format import CONFIG_FILE, element_count, stored_dtype
from kbitq.formats.base import ForeignWeight
from kbitq.text_safety import shown

MAX_CONFIG_BYTES = 16_000_000
_OTHER_FILES = {
    ".onnx": "an ONNX model",
    ".h5": "an HDF5 file of Keras",
    ".tflite": "a TensorFlow Lite model",
    ".msgpack": "a file of Flax",
}
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")
_INCOMPLETE = "download the checkpoint again; nothing was written"


@dataclass(frozen=True)
class Scaling:
    """How a scaled FP8 tensor is decoded: each value times the scale of its block of ``block`` rows and columns.

    ``scale`` is ``[..., ceil(rows / block[0]), ceil(cols / block[1])]``, or one element for the whole tensor.
    """

    stored: str
    scale: SourceTensor
    block: tuple[int, int]


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a checkpoint: what it is and where its bytes are. ``offset`` counts from the start of ``file``.

    With ``scaling`` the bytes are FP8 and ``dtype`` is what they decode to; ``nbytes`` is what is stored. With
    ``foreign`` the tensor is a weight in another tool's format, made of ``parts``: whoever reads its bytes gets those
    of the decoded weight, and ``nbytes`` counts these.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    scaling: Scaling | None = None
    foreign: ForeignWeight | None = None
    parts: tuple[SourceTensor, ...] = ()

    @property
    def file_nbytes(self) -> int:
        """Bytes that it takes in the files."""
        return sum(part.nbytes for part in self.parts) if self.parts else self.nbytes

    @property
    def stored_bits(self) -> int:
        """Bits of an element in the file."""
        return stored_dtype(self.scaling.stored if self.scaling else self.dtype).bits

    @property
    def plain_nbytes(self) -> int:
        """Bytes of the tensor as an ordinary one: what copying it takes."""
        if self.scaling is None:
            return self.nbytes
        return element_count(self.shape) * stored_dtype(self.dtype).bits // 8


@dataclass
class Checkpoint:
    """An opened checkpoint: everything that headers, index and config say; no tensor data has been read.

    ``tensors`` are in the order of the files and of the bytes in them. ``stem`` is the common name of the weight files
    (``model``). ``weight_map`` is what the index says, file name by tensor name. ``carried`` are the files that go with
    the weights; ``notes`` say what does not, and why. ``dropped`` are tensors that only take part in decoding others
    (scales). ``schemes`` are other tools' formats that weights are in, with how many are.
    """

    storage: Storage
    stem: str
    headers: dict[str, Header]
    fingerprints: dict[str, Fingerprint]
    tensors: dict[str, SourceTensor]
    index: str | None = None
    weight_map: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    carried: list[str] = field(default_factory=list)
    carried_sizes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    schemes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        return self.storage.where

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as the files hold them."""
        return sum(t.file_nbytes for t in self.tensors.values())

    def describe(self, tensor: SourceTensor) -> str:
        """How an error names a tensor: its file and itself."""
        return f"{self.file_where(tensor.file)}: tensor {shown(tensor.name)}"

    def file_where(self, name: str) -> str:
        return self.where if self.storage.single else f"{self.where}/{name}"


def open_checkpoint(source: str | os.PathLike[str] | Storage) -> Checkpoint:
    """Open a file, a folder, or anything with the methods of ``Storage``. Raises CheckpointError."""
    storage = as_gguf(open_storage(source) if isinstance(source, str | os.PathLike) else source)
    if storage.single is not None:
        return _assemble(storage, storage.name, [storage.single])
    names = storage.names()
    index = None if isinstance(storage, GgufStorage) else _index_of(storage, names)
    weight_map = read_index(storage, index) if index is not None else {}
    if isinstance(storage, GgufStorage):
        stem, files = "model", storage.files
    elif index is not None:
        stem, files = _indexed_files(storage, names, index, weight_map)
    else:
        stem, files = _files_without_index(storage, names)
    checkpoint = _assemble(storage, stem, files)
    checkpoint.index, checkpoint.weight_map = index, weight_map
    if index is not None:
        _check_index(checkpoint, index)
    if CONFIG_FILE in names:
        text = read_all(storage, CONFIG_FILE, MAX_CONFIG_BYTES)
        checkpoint.config = parse_json_object(text, f"{storage.where}/{CONFIG_FILE}")
    others = sort_files(names, files)
    checkpoint.carried = others.carried
    checkpoint.carried_sizes = {name: _file_size(storage, name) for name in others.carried}
    if isinstance(storage, GgufStorage):
        checkpoint.notes += storage.notes
    checkpoint.notes += [f"not carried over: {note}" for note in storage.skipped()] + others.notes
    return checkpoint


def _file_size(storage: Storage, name: str) -> int:
    file = storage.open(name)
    try:
        return file.size
    finally:
        file.close()


def read_header(storage: Storage, name: str) -> tuple[Header, Fingerprint]:
    """Read and check the header of one file."""
    if isinstance(storage, GgufStorage):
        return storage.header(name)
    file = storage.open(name)
    try:
        prefix = bytearray(min(LENGTH_BYTES, file.size))
        file.read_into(memoryview(prefix), 0)
        text = bytearray(header_length(bytes(prefix), file.size, file.where))
        file.read_into(memoryview(text), LENGTH_BYTES)
        return parse_header(bytes(text), file.size, file.where), file.fingerprint()
    finally:
        file.close()


def read_index(storage: Storage, name: str) -> dict[str, str]:
    """The ``weight_map`` of an index: tensor name to file name. Raises CheckpointError."""
    where = f"{storage.where}/{name}"
    table = parse_json_object(read_all(storage, name, MAX_HEADER_BYTES), where)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where} has no weight_map")
    for tensor, file in weight_map.items():
        # Files lie beside the index; anything else would let a stranger's JSON choose what we read.
        if not isinstance(file, str) or "/" in file or "\\" in file or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(
                f"{where}: tensor {shown(tensor)} is said to be in '{shown(file)}', which leaves the folder",
                hint="do not trust this checkpoint",
            )
    return weight_map


def _at_top(names: list[str], suffix: str) -> list[str]:
    return [n for n in names if "/" not in n and n.endswith(suffix) and not is_duplicate_weights(n)]


def _index_of(storage: Storage, names: list[str]) -> str | None:
    """The index of the weights of a folder, if there is one."""
    indexes = _at_top(names, INDEX_SUFFIX)
    if len(indexes) > 1:
        raise CheckpointError(f"{storage.where} has more than one index: {', '.join(indexes)}", hint="keep one of them")
    return indexes[0] if indexes else None


def _indexed_files(storage: Storage, names: list[str], index: str, weight_map: dict[str, str]) -> tuple[str, list[str]]:
    """The stem and the files that an index names, all of them present and none left over."""
    stem, files = index.removesuffix(INDEX_SUFFIX), sorted(set(weight_map.values()))
    _check_shards_present(storage, files, [n for n in names if "/" not in n], index)
    _check_no_stray_shards(storage, stem, files, _at_top(names, WEIGHTS_SUFFIX), index)
    return stem, files


def _files_without_index(storage: Storage, names: list[str]) -> tuple[str, list[str]]:
    """The stem and the weight files of a folder that has no index."""
    weights = _at_top(names, WEIGHTS_SUFFIX)
    if not weights:
        raise _no_weights(storage, names)
    return _without_index(storage, weights)


def _check_shards_present(storage: Storage, files: list[str], top: list[str], index: str) -> None:
    if missing := [f for f in files if f not in set(top)]:
        raise CheckpointError(
            f"{storage.where}/{shown(missing[0])} is missing, though {index} names it"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
            hint=_INCOMPLETE,
        )
    for file in files:
        if not file.endswith(WEIGHTS_SUFFIX):
            raise CheckpointError(f"{storage.where}/{index} names '{shown(file)}', which is not a safetensors file")


def _check_no_stray_shards(storage: Storage, stem: str, files: list[str], weights: list[str], index: str) -> None:
    taken = set(files)
    for name in weights:
        shard = _SHARD.fullmatch(name)
        if name not in taken and (name == stem + WEIGHTS_SUFFIX or (shard and shard["stem"] == stem)):
            raise CheckpointError(
                f"{storage.where}/{name} is not named by {index}: the index is stale, or the file is left over",
                hint="remove the file, or make the index name it",
            )


def _without_index(storage: Storage, weights: list[str]) -> tuple[str, list[str]]:
    """One file, or a complete numbered set."""
    if "model" + WEIGHTS_SUFFIX in weights or len(weights) == 1:
        name = weights[0] if len(weights) == 1 else "model" + WEIGHTS_SUFFIX
        if not (shard := _SHARD.fullmatch(name)) or int(shard["count"]) == 1:
            return (shard["stem"] if shard else name.removesuffix(WEIGHTS_SUFFIX)), [name]
    return numbered_shards(storage, weights)


def numbered_shards(storage: Storage, weights: list[str]) -> tuple[str, list[str]]:
    """The stem and the files of a complete set ``stem-00001-of-0000N``. Raises CheckpointError for anything else."""
    shards = [m for m in map(_SHARD.fullmatch, weights) if m]
    sets = {(m["stem"], m["count"]) for m in shards}
    if len(sets) != 1 or len(shards) != len(weights):
        raise CheckpointError(
            f"{storage.where} has {len(weights)} safetensors files and no index: {', '.join(weights[:5])}",
            hint="give one of the files as the source, or add model.safetensors.index.json",
        )
    stem, count = sets.pop()
    numbers = {int(m["number"]) for m in shards}
    if missing := sorted(set(range(1, min(int(count), len(shards) + 1) + 1)) - numbers):
        name = f"{stem}-{missing[0]:05d}-of-{count}{WEIGHTS_SUFFIX}"
        raise CheckpointError(f"{storage.where}/{name} is missing", hint=_INCOMPLETE)
    return stem, sorted(weights)


def _no_weights(storage: Storage, names: list[str]) -> CheckpointError:
    nested = sorted({n.rsplit("/", 1)[0] for n in names if n.endswith(WEIGHTS_SUFFIX)})
    if nested:
        return CheckpointError(
            f"{storage.where} has no safetensors file at its top, only in sub-folders ({', '.join(nested[:5])})",
            hint=f"give the sub-folder as the source: {storage.where}/{nested[0]}",
        )
    if pickles := sort_files(names, ()).pickles:
        return CheckpointError(
            f"{storage.where} has only pickles ({shown(pickles[0])}), which can run code and are refused",
            hint="convert them to safetensors in a place you trust, for instance with transformers' save_pretrained",
        )
    if other := next(((n, kind) for n in names for end, kind in _OTHER_FILES.items() if n.endswith(end)), None):
        return CheckpointError(
            f"{storage.where} has no safetensors file; {shown(other[0])} is {other[1]}",
            hint="kbitq reads safetensors: give the model that this file was made from",
        )
    return CheckpointError(f"{storage.where} has no safetensors file")


def _assemble(storage: Storage, stem: str, files: Iterable[str]) -> Checkpoint:
    checkpoint = Checkpoint(storage, stem, {}, {}, {})
    for name in files:
        header, checkpoint.fingerprints[name] = read_header(storage, name)
        checkpoint.headers[name] = header
        for ref in header.tensors:
            if ref.name in checkpoint.tensors:
                first = checkpoint.tensors[ref.name].file
                raise CheckpointError(
                    f"{storage.where}: tensor {shown(ref.name)} is in both {first} and {name}",
                    hint="remove the file that does not belong to this checkpoint",
                )
            checkpoint.tensors[ref.name] = _source_tensor(ref, name)
    if not checkpoint.tensors:
        raise CheckpointError(f"{storage.where} holds no tensors")
    return checkpoint


def _source_tensor(ref: TensorRef, file: str) -> SourceTensor:
    return SourceTensor(ref.name, ref.dtype, ref.shape, file, ref.offset, ref.nbytes)


def _check_index(checkpoint: Checkpoint, index: str) -> None:
    """Every tensor that the index names must be in the file it says. Tensors it forgets are used, and noted."""
    for name, file in checkpoint.weight_map.items():
        found = checkpoint.tensors.get(name)
        if found is None or found.file != file:
            place = f"it is in {found.file}" if found else "no shard has it"
            raise CheckpointError(
                f"{checkpoint.where}/{index}: tensor {shown(name)} is said to be in {file}, but {place}",
                hint="download the checkpoint again, or repair_index(path)",
                remedy="index",
                data={"path": checkpoint.where},
            )
    forgotten = [n for n in checkpoint.tensors if n not in checkpoint.weight_map]
    if forgotten:
        checkpoint.notes.append(
            f"{len(forgotten)} tensors are not in {index}, such as {shown(forgotten[0])}; taken along"
        )
