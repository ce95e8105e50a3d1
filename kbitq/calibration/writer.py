"""Writing a folder of statistics, a few H at a time, in the hidden folder that becomes the output when all are there.

What was written is in a journal, so that a run that was cut goes on behind it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kbitq.calibration.statistics import (
    DIAGONAL,
    STEM,
    SUMMARY_FILE,
    TRIANGLE,
    Entry,
    Summary,
    parse_summary,
    stored_shape,
)
from kbitq.calibration.triangle import blocks, triangle, triangle_elements
from kbitq.checkpoint.output.file_writer import FileWriter, writing
from kbitq.checkpoint.output.folder import json_text
from kbitq.checkpoint.output.layout import (
    DEFAULT_SHARD_BYTES,
    Group,
    Shard,
    format_index,
    index_name,
    lay_out,
    shard_name,
)
from kbitq.checkpoint.output.staging import Staging
from kbitq.errors import CalibrationError
from kbitq.format import Entry as StoredTensor

_FORMAT = {"format": "pt"}  # what other readers of safetensors expect
_ON_A_GPU = 8  # H that are copied from it, hashed and written at once; on the CPU each more takes memory of its own


@dataclass
class Gathered:
    """H of one input, as it was summed up.

    Attributes:
        tensors: names of the weights in the model's files -> their expert, or None for all of them.
        columns: of those weights, ``in``; where they are transposed, their rows.
        block: columns of a block on the diagonal, or None for the whole matrix.
        tokens: of each expert.
        sums: of each expert, the blocks on the diagonal, float32 ``[n, n]`` on any device, of which the lower triangle
            counts; None without any tokens.
        transposed: whether those weights are stored ``[in, out]``.
    """

    tensors: Mapping[str, int | None]
    columns: int
    block: int | None
    tokens: Sequence[int]
    sums: Sequence[Sequence[Tensor] | None]
    transposed: bool = False


class _Journal:
    """Lines of JSON, each on the disk before the next thing happens."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Any]:
        """All whole lines; one that a run was cut in is removed. ValueError where something else is in the file."""
        if not self._path.exists():
            return []
        with writing(self._path):
            text = self._path.read_text(encoding="utf-8")
            lines = text.splitlines(keepends=True)
            if lines and not lines[-1].endswith("\n"):
                os.truncate(self._path, len(text.encode()) - len(lines.pop().encode()))
        return [json.loads(line) for line in lines]


class StatisticsWriter:
    """The folder in the making, of one run at a time: a context manager.

    Args:
        out: the folder's final name.
        key: what the sums depend on; work of an earlier run with another key is thrown away.
        max_shard_size: bytes of a file, as far as one H is not larger.

    Attributes:
        entries: what is written, of earlier runs too.
        steps: how often ``add`` has been called, in earlier runs too.
    """

    def __init__(self, out: Path, key: Mapping[str, Any], max_shard_size: int = DEFAULT_SHARD_BYTES) -> None:
        self._staging, self._key, self._max = Staging(out), json.dumps(key, sort_keys=True), max_shard_size
        self._journal = _Journal(self._staging.journal)
        self.entries: list[Entry] = []
        self.steps = 0
        self._parts: list[tuple[str, list[str]]] = []  # file, names of the tensors in it

    def __enter__(self) -> StatisticsWriter:
        self._staging.__enter__()
        try:
            if not self._take_up():
                self.start_over()
        except BaseException:
            self._staging.__exit__()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.entries and self._staging.folder.exists():
            self._staging.discard()  # nothing worth going on from
        self._staging.__exit__()

    @property
    def folder(self) -> Path:
        """For files that are needed while the output is made; whoever makes one removes it."""
        return self._staging.folder

    def start_over(self) -> None:
        """Throw away what is written."""
        self._staging.clear()
        self.entries, self.steps, self._parts = [], 0, []
        self._journal.add({"key": self._key})

    def check_space(self, nbytes: int) -> None:
        """Raise NoSpaceError unless the disk can hold ``nbytes`` of H in all."""
        self._staging.check_space(nbytes)

    def add(self, gathered: Sequence[Gathered]) -> None:
        """Write some H; when this returns they are on the disk. Raises CheckpointError, NoSpaceError."""
        sized = {_entry(found, "").name: found for found in gathered}
        shards = lay_out([Group(_stored(_entry(f, ""))) for f in gathered], STEM, self._max, kbitq=False)
        entries: dict[str, Entry] = {}
        parts: list[tuple[str, list[str]]] = []
        for shard in shards if gathered else []:
            file = f"part-{len(self._parts) + len(parts):05d}"
            shard.extra = _FORMAT
            shard.__post_init__()  # the header again, with it
            names = [p.entry.name for p in shard.placed]
            stems = [name.removesuffix(TRIANGLE) for name in names if name.endswith(TRIANGLE)]
            digests = self._write(file, shard, [sized[stem] for stem in stems])
            entries.update({stem: _entry(sized[stem], digest) for stem, digest in zip(stems, digests, strict=True)})
            parts.append((file, names))
        added = [entries[stem] for stem in sized]
        self._journal.add({"parts": parts, "entries": [entry.as_json() for entry in added]})
        self.entries += added
        self._parts += parts
        self.steps += 1

    def finish(
        self, model: Mapping[str, Any], text: Mapping[str, Any], versions: Mapping[str, Any], *, replace: bool
    ) -> Summary:
        """Give the folder its final name. Raises CheckpointError, OutputExistsError."""
        summary = Summary(model, text, versions, tuple(self.entries))
        weight_map = {}
        for i, (file, names) in enumerate(self._parts):
            final = shard_name(STEM, i, len(self._parts))
            with writing(self._staging.path(final)):
                if self._staging.path(file).exists():  # else an earlier run was cut here
                    self._staging.path(file).rename(self._staging.path(final))
            weight_map.update(dict.fromkeys(names, final))
        if len(self._parts) > 1:
            total = sum(entry.nbytes for found in self.entries for entry in _stored(found))
            self._staging.write_file(index_name(STEM), format_index(weight_map, total).encode())
        self._staging.write_file(SUMMARY_FILE, json_text(summary.as_json()))
        self._staging.publish_folder(replace=replace)
        return summary

    def _write(self, file: str, shard: Shard, gathered: Sequence[Gathered]) -> list[str]:
        with FileWriter(self._staging.path(file), shard.nbytes) as writer:
            writer.write(0, shard.header())
            at_once = _ON_A_GPU if any(sums and sums[0].is_cuda for found in gathered for sums in found.sums) else 1
            pool = ThreadPoolExecutor(at_once, thread_name_prefix="kbitq-statistics")
            try:
                digests = list(pool.map(partial(_write_hessian, writer, shard), gathered))
            finally:
                pool.shutdown(cancel_futures=True)
            writer.sync()
        return digests

    def _take_up(self) -> bool:
        """Go on from an earlier run; False where there is none with the same key, or its files are not whole."""
        try:
            head, *steps = self._journal.read()
            if head != {"key": self._key}:
                return False
            for step in steps:
                self._take_up_step(step)
        except (ValueError, KeyError, TypeError, AttributeError, CalibrationError):
            return False
        return all(self._is_whole(i, file) for i, (file, _) in enumerate(self._parts))

    def _take_up_step(self, step: Mapping[str, Any]) -> None:
        empty: dict[str, Any] = {}
        table = {"format": "kbitq-calibration", "version": 1, "model": empty, "text": empty, "versions": empty}
        self.entries += parse_summary({**table, "hessians": step["entries"]}, SUMMARY_FILE).entries
        self._parts += [(str(file), [str(name) for name in names]) for file, names in step["parts"]]
        self.steps += 1

    def _is_whole(self, index: int, file: str) -> bool:
        """Whether a part is there, under its own or its final name."""
        final = shard_name(STEM, index, len(self._parts))
        return any((self._staging.output / name).is_file() for name in (file, final))


def _entry(found: Gathered, digest: str) -> Entry:
    return Entry(found.columns, found.block, tuple(found.tokens), digest, dict(found.tensors), found.transposed)


def _stored(entry: Entry) -> list[StoredTensor]:
    lengths = {TRIANGLE: triangle_elements(entry.columns, entry.block), DIAGONAL: entry.columns}
    return [StoredTensor(entry.name + kind, "F32", stored_shape(entry, length)) for kind, length in lengths.items()]


def _write_hessian(writer: FileWriter, shard: Shard, found: Gathered) -> str:
    """Write triangle and diagonal of one H; the SHA-256 of the triangle's values."""
    name, digest = next(iter(found.tensors)), hashlib.sha256()
    at, diagonal_at = shard.offsets[name + TRIANGLE], shard.offsets[name + DIAGONAL]
    for sums in found.sums:
        zeros = (torch.zeros(len(part), len(part)) for part in blocks(found.columns, found.block))
        for matrix in zeros if sums is None else sums:
            for piece in triangle(matrix):
                digest.update(memoryview(piece.numpy()).cast("B"))  # type: ignore[arg-type]
                writer.write(at, piece)
                at += piece.nbytes
            diagonal = matrix.diagonal().to("cpu", torch.float32).contiguous()
            writer.write(diagonal_at, diagonal)
            diagonal_at += diagonal.nbytes
    return digest.hexdigest()
