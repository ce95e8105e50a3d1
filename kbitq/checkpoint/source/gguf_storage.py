"""GGUF files as a folder of Hugging Face's: their tensors under its names, config.json and the tokenizer rebuilt.

The rebuilt files exist in memory only; where the folder has files of those names, these are taken.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import replace
from glob import escape
from pathlib import Path

from kbitq.checkpoint.source.header import Header, TensorRef
from kbitq.checkpoint.source.storage import (
    ByteFile,
    Fingerprint,
    LocalFileStorage,
    LocalFolderStorage,
    Storage,
    hub_label,
)
from kbitq.errors import CheckpointError
from kbitq.format import CONFIG_FILE
from kbitq.formats.gguf import config, names, tokenizer, weights
from kbitq.formats.gguf.container import SPLIT, SUFFIX, GgufFile, GgufTensor, read_gguf
from kbitq.formats.gguf.names import Named, architecture_of
from kbitq.formats.gguf.vector_dtype import dtype_that_fits
from kbitq.text_safety import shown

_MOST_FLOATS = 4096
_LISTED = 5  # names in a message
_MOST_VECTOR_BYTES = 4 << 20


class MemoryFile:
    """Bytes as a file of a checkpoint."""

    def __init__(self, data: bytes, where: str) -> None:
        self.where, self.size, self._data = where, len(data), data

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if not 0 <= offset <= self.size - len(buffer):
            raise CheckpointError(f"{self.where} ends before byte {offset + len(buffer):,}")
        buffer[:] = self._data[offset : offset + len(buffer)]

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.size, hashlib.sha256(self._data).hexdigest())

    def close(self) -> None:
        pass


class GgufStorage:
    """One GGUF file, or a whole set ``-00001-of-0000N``, of another storage.

    Attributes:
        inner: the storage that has the files.
        files: of the set, in order.
        notes: sentences about what could not be rebuilt.
        given: the file or folder on this machine that the user named, if any.
    """

    single = None

    def __init__(self, inner: Storage, files: list[str], given: Path | None) -> None:
        self.inner, self.files, self.given = inner, files, given
        split = SPLIT.fullmatch(files[0])
        self.name = (split["stem"] if split else files[0].removesuffix(SUFFIX)).rpartition("/")[2]
        self.label, self.distant = (given and hub_label(given)) or inner.label, inner.distant
        self.where = str(given.parent) if given is not None and inner.single else inner.where
        self._alone = inner.single is not None or (given is not None and given.suffix == SUFFIX)
        self._headers, made, self.notes = _read(inner, files)
        present = set(self._others())
        self._made = {name: data for name, data in made.items() if name not in present}

    def _others(self) -> list[str]:
        """Files beside the weights that belong to them: none where the user named a file and no folder."""
        return [] if self._alone else self.inner.names()

    def names(self) -> list[str]:
        return sorted({*self.files, *self._made, *self._others()})

    def skipped(self) -> list[str]:
        return [] if self._alone else self.inner.skipped()

    def open(self, name: str) -> ByteFile:
        if name in self._made:
            return MemoryFile(self._made[name], f"{self.where}/{name}")
        return self.inner.open(name)

    def header(self, name: str) -> tuple[Header, Fingerprint]:
        """What ``read_header`` says of a safetensors file."""
        return self._headers[name]


def as_gguf(storage: Storage) -> Storage:
    """The storage of GGUF files behind a source that has no other weights; any other storage as it is."""
    if isinstance(storage, LocalFileStorage):
        if not storage.given.name.endswith(SUFFIX):
            return storage
        split = SPLIT.fullmatch(storage.given.name)
        if split is None or int(split["count"]) == 1:
            return GgufStorage(storage, [storage.given.name], storage.given)
        folder = LocalFolderStorage(storage.given.parent)
        return GgufStorage(folder, gguf_files(folder.where, folder.names(), storage.given.name), storage.given)
    if storage.single is not None:
        return storage
    files = gguf_files(storage.where, storage.names())
    given = storage.root if isinstance(storage, LocalFolderStorage) else None
    return GgufStorage(storage, files, given) if files else storage


def gguf_files(where: str, listed: list[str], chosen: str | None = None) -> list[str]:
    """The files of the one model in GGUF that a folder or repository is; none where it has other weights, or no GGUF.

    Args:
        where: names it in messages.
        listed: its files.
        chosen: one of them, which says which model is meant.

    Raises:
        CheckpointError: ``chosen`` is not there, a set is not whole, or there are several models to choose from.
    """
    if chosen is not None:
        if chosen not in listed:
            raise no_such_file(where, listed, chosen)
        split = SPLIT.fullmatch(chosen)
        return [chosen] if split is None else _whole_set(where, listed, split["stem"], split["count"])
    if any(name.endswith(".safetensors") and "/" not in name for name in listed):
        return []
    models = [name for name in listed if name.endswith(SUFFIX)]
    top = [name for name in models if "/" not in name]
    found = models if len(models) == len(listed) else top  # a part of a repository that was asked for by name
    return _only_set(where, found) if found else []


def gguf_pattern(file: str) -> str:
    """The pattern of ``fnmatch`` for the names of a GGUF file and the rest of its set."""
    split = SPLIT.fullmatch(file)
    return escape(file) if split is None else f"{escape(split['stem'])}-*-of-{split['count']}{SUFFIX}"


def no_such_file(where: str, listed: list[str], chosen: str) -> CheckpointError:
    """The error of a GGUF file that a folder or repository does not have."""
    others = [shown(name) for name in listed if name.endswith(SUFFIX)]
    hint = f"it has {', '.join(others[:_LISTED])}" + (f" and {len(others) - _LISTED} more" * (len(others) > _LISTED))
    return CheckpointError(f"{where} has no file {shown(chosen)}", hint=hint if others else "it has no GGUF file")


def _only_set(where: str, top: list[str]) -> list[str]:
    splits = [SPLIT.fullmatch(name) for name in top]
    if len(top) == 1 and splits[0] is None:
        return top
    kinds = {(m["stem"], m["count"]) if m else (name, "") for name, m in zip(top, splits, strict=True)}
    if len(kinds) > 1:
        more = f" and {len(top) - _LISTED} more" if len(top) > _LISTED else ""
        raise CheckpointError(
            f"{where} has {len(top)} GGUF files of several models: {', '.join(map(shown, top[:_LISTED]))}{more}",
            hint="give one of the files as the source: FOLDER/FILE.gguf, or org/name/FILE.gguf on the Hub",
        )
    return _whole_set(where, top, *kinds.pop())


def _whole_set(where: str, listed: list[str], stem: str, count: str) -> list[str]:
    files = [f"{stem}-{i + 1:05d}-of-{count}{SUFFIX}" for i in range(int(count))]
    present = set(listed)
    if missing := [name for name in files if name not in present]:
        raise CheckpointError(f"{where}/{shown(missing[0])} is missing", hint="download the checkpoint again")
    return files


def _read(
    storage: Storage, files: list[str]
) -> tuple[dict[str, tuple[Header, Fingerprint]], dict[str, bytes], list[str]]:
    """Headers by file, rebuilt files by name, and notes."""
    parsed: list[tuple[GgufFile, Fingerprint]] = []
    for name in files:
        file = storage.open(name)
        try:
            parsed.append((read_gguf(file), file.fingerprint()))
        finally:
            file.close()
    if not any(one.tensors for one, _ in parsed):
        raise CheckpointError(f"{storage.where}: {shown(files[0])} holds no tensors")
    metadata = parsed[0][0].metadata
    named = [names.hugging_face_names(metadata, one.tensors) for one, _ in parsed]
    dtype = _vector_dtype(storage, files, [found for found, _ in named]) if architecture_of(metadata) else None
    if dtype is not None:
        named = [([_narrowed(n, dtype) for n in found], kept) for found, kept in named]
    everything = [n for found, _ in named for n in found]
    headers = {}
    for i, (name, (one, fingerprint)) in enumerate(zip(files, parsed, strict=True)):
        told = {weights.METADATA_KEY: weights.announced(everything)} if i == 0 else {}
        headers[name] = Header(tuple(map(_ref, named[i][0])), told, one.data_start), fingerprint
    made, notes = _rebuilt(storage, files, [one for one, _ in parsed], dtype)
    unknown = [name for _, names_ in named for name in names_]
    if unknown and CONFIG_FILE in made:
        notes.append(f"{len(unknown)} tensors keep llama.cpp's names, such as {shown(unknown[0])}")
    return headers, made, notes


def _ref(named: Named) -> TensorRef:
    if named.as_it_is:
        plain = named.tensor.type.plain
        assert plain is not None
        return TensorRef(named.name, plain, named.shape, named.nbytes, named.offset)
    return TensorRef(named.name, "U8", weights.stored_shape(named), named.nbytes, named.offset)


def _vector_dtype(storage: Storage, files: list[str], named: list[list[Named]]) -> str | None:
    """The dtype that all norms and biases had before llama.cpp widened them, if one holds them exactly."""
    vectors = []
    for name, found in zip(files, named, strict=True):
        mine = [n for n in found if n.is_float32_vector]
        if any(n.nbytes > _MOST_VECTOR_BYTES for n in mine):
            return None
        if mine:
            file = storage.open(name)
            try:
                vectors += [(_bytes_of(file, n), n.less) for n in mine]
            finally:
                file.close()
    return dtype_that_fits(vectors)


def _bytes_of(file: ByteFile, named: Named) -> bytes:
    data = bytearray(named.nbytes)
    file.read_into(memoryview(data), named.offset)
    return bytes(data)


def _narrowed(named: Named, dtype: str) -> Named:
    return replace(named, dtype=dtype) if named.is_float32_vector else named


def _rebuilt(
    storage: Storage, files: list[str], parsed: list[GgufFile], dtype: str | None
) -> tuple[dict[str, bytes], list[str]]:
    place = {t.name: (name, t) for name, one in zip(files, parsed, strict=True) for t in one.tensors}

    def floats(tensor: GgufTensor) -> list[float]:
        if tensor.type.plain != "F32" or tensor.nbytes > 4 * _MOST_FLOATS:
            return []
        file = storage.open(place[tensor.name][0])
        try:
            data = bytearray(tensor.nbytes)
            file.read_into(memoryview(data), tensor.offset)
        finally:
            file.close()
        found = list(struct.unpack(f"<{len(data) // 4}f", data))
        return found if all(map(math.isfinite, found)) else []  # JSON has no other numbers

    metadata = parsed[0].metadata
    fields, notes = config.config_of(metadata, {name: t for name, (_, t) in place.items()}, floats, dtype)
    contents, missing = tokenizer.tokenizer_files(metadata)
    made = {name: config.json_text(value) for name, value in contents.items()}
    if fields is not None:
        made[CONFIG_FILE] = config.json_text(fields)
    return made, notes + missing
