"""From tensors to files: which shard each tensor goes to, and at which byte, before any value is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kbitq.checkpoint.source.side_files import INDEX_SUFFIX, WEIGHTS_SUFFIX
from kbitq.format import Entry, HeaderText, Placed, ShardMeta, place


@dataclass
class Shard:
    """One output file: its name, its tensors at their places, its metadata. ``meta`` None: an ordinary checkpoint.

    ``extra`` are further strings for the file's ``__metadata__``. ``silent``: ``meta`` is known and not written, since
    other tools are to read the file.
    """

    name: str
    placed: list[Placed]
    meta: ShardMeta | None
    extra: Mapping[str, str] | None = None
    silent: bool = False
    _header: HeaderText = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._header = HeaderText(self.placed, None if self.silent else self.meta, self.extra or {})

    @property
    def header_nbytes(self) -> int:
        return self._header.nbytes

    @property
    def data_nbytes(self) -> int:
        return self.placed[-1].end if self.placed else 0

    @property
    def nbytes(self) -> int:
        """Exact size of the file."""
        return self.header_nbytes + self.data_nbytes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte of the file at which each stored tensor begins."""
        return {p.entry.name: self.header_nbytes + p.start for p in self.placed}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each stored tensor."""
        return {p.entry.name: p.entry.shape for p in self.placed}

    def header(self) -> bytes:
        """The bytes before the data; call once the statistics in ``meta`` are known."""
        return self._header.filled()


@dataclass
class Group:
    """Tensors that stay in one shard together, and what the shard's metadata gets of them."""

    entries: list[Entry]
    meta: ShardMeta = field(default_factory=ShardMeta)

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for e in self.entries)


def lay_out(
    groups: Sequence[Group], stem: str, max_shard_size: int | None, *, kbitq: bool, silent: bool = False
) -> list[Shard]:
    """Fill shards with groups in the order given, each up to ``max_shard_size`` bytes of data (None: one file).

    A group larger than that has a shard for itself. ``kbitq`` says whether the files carry kbitq's metadata, and
    ``silent`` that it is kept but not written.
    """
    parts: list[list[Group]] = [[]]
    size = 0
    for group in groups:
        if max_shard_size is not None and parts[-1] and size + group.nbytes > max_shard_size:
            parts.append([])
            size = 0
        parts[-1].append(group)
        size += group.nbytes
    return [_shard(shard_name(stem, i, len(parts)), part, kbitq, silent) for i, part in enumerate(parts)]


def shard_name(stem: str, index: int, count: int) -> str:
    """The usual name of shard ``index`` (from 0) of ``count``."""
    return stem + (f"-{index + 1:05d}-of-{count:05d}" if count > 1 else "") + WEIGHTS_SUFFIX


def index_name(stem: str) -> str:
    """The file that says which shard has a tensor, of the shards named ``stem-00001-of-...``."""
    return stem + INDEX_SUFFIX


def _shard(name: str, groups: Sequence[Group], kbitq: bool, silent: bool) -> Shard:
    meta = ShardMeta() if kbitq else None
    if meta is not None:
        for group in groups:
            meta.tensors.update(group.meta.tensors)
            meta.kept.update(group.meta.kept)
    return Shard(name, place(e for g in groups for e in g.entries), meta, silent=silent)


def index_json(shards: Sequence[Shard]) -> str:
    """The text of ``*.safetensors.index.json`` for these shards."""
    return format_index({p.entry.name: s.name for s in shards for p in s.placed}, sum(s.data_nbytes for s in shards))


def format_index(weight_map: dict[str, str], total_size: int) -> str:
    """An index as other tools write it: indented, names sorted, a newline at the end."""
    table = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


DEFAULT_SHARD_BYTES = 5_000_000_000
