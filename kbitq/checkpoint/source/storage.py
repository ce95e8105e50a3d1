"""Where checkpoints come from: something that lists files and reads byte ranges of them.

``Storage`` is the seam. The local ones are here; a remote one only has to give the same few methods. Confinement is
decided here too: every name that leads out of the folder, and everything that is not a regular file, is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from kbitq.errors import CheckpointError
from kbitq.text_safety import shown


@dataclass(frozen=True)
class Fingerprint:
    """Tells whether a file is still the one planned for: its size, and a token that changes with its content."""

    size: int
    token: str


class ByteFile(Protocol):
    """An open file of a checkpoint."""

    where: str  # names the file in messages
    size: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from byte ``offset`` on, wholly, or raise CheckpointError."""

    def fingerprint(self) -> Fingerprint: ...

    def close(self) -> None: ...


class Storage(Protocol):
    """A checkpoint's files."""

    where: str  # the checkpoint, as the user named it
    name: str  # its short name, for naming outputs
    label: str  # what it is called elsewhere too: org/name@commit of the Hub, else the name of the file or folder
    distant: bool  # reading its bytes twice is dear

    @property
    def single(self) -> str | None:
        """The one file, where the source is a file and not a folder."""

    def names(self) -> list[str]:
        """Relative names (with /) of all regular files, sorted."""

    def skipped(self) -> list[str]:
        """Sentences about what ``names`` left out, and why."""

    def open(self, name: str) -> ByteFile: ...


def read_all(storage: Storage, name: str, limit: int) -> bytes:
    """A whole small file. Raises CheckpointError for one larger than ``limit`` bytes."""
    file = storage.open(name)
    try:
        if file.size > limit:
            raise CheckpointError(f"{file.where} has {file.size:,} bytes; at most {limit:,} are expected of it")
        buffer = bytearray(file.size)
        file.read_into(memoryview(buffer), 0)
        return bytes(buffer)
    finally:
        file.close()


class LocalFile:
    """A regular file opened for positioned reads; never mapped, so that pages read do not count as this process's."""

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer before it can be refused.
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be opened: {error.strerror}") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise CheckpointError(f"{where} is not a regular file")
        self.size = status.st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        if not 0 <= offset <= self.size - len(buffer):
            raise CheckpointError(f"{self.where} ends before byte {offset + len(buffer):,}")
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.where} cannot be read: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(f"{self.where} became shorter while it was read", hint="run the command again")
            done += count

    def fingerprint(self) -> Fingerprint:
        status = os.fstat(self._fd)
        return Fingerprint(status.st_size, f"{status.st_mtime_ns}:{status.st_ino}")

    def close(self) -> None:
        os.close(self._fd)


class LocalFileStorage:
    """A source that is one file. The user named it, so a link is followed; what it leads to must be a regular file."""

    distant = False

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.name = path.name.removesuffix(".safetensors")
        self.given, self.path, self.label = path, path.resolve(), path.name

    @property
    def single(self) -> str | None:
        return self.given.name

    def names(self) -> list[str]:
        return [self.given.name]

    def skipped(self) -> list[str]:
        return []

    def open(self, name: str) -> ByteFile:
        return LocalFile(self.path, self.where)


class LocalFolderStorage:
    """A source that is a folder. Links are refused, but for those of a Hub cache into its own ``blobs/``."""

    distant = False

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.root = folder.resolve()
        self._blobs = hub_cache_blobs(self.root)
        self.label = _hub_label(self.root, self._blobs) or self.root.name or "checkpoint"
        self.name = self.label.partition("@")[0].rpartition("/")[2] if self.in_hub_cache else self.label
        self._skipped: list[str] = []

    @property
    def single(self) -> str | None:
        return None

    @property
    def in_hub_cache(self) -> bool:
        return self._blobs is not None

    def names(self) -> list[str]:
        self._skipped = []
        return sorted(self._walk(self.root, ""))

    def skipped(self) -> list[str]:
        return list(self._skipped)

    def open(self, name: str) -> ByteFile:
        return LocalFile(self._confined(name), f"{self.where}/{shown(name)}")

    def _walk(self, folder: Path, prefix: str) -> Iterator[str]:
        try:
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError as error:
            raise CheckpointError(f"{self.where}/{shown(prefix)} cannot be listed: {error.strerror}") from None
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if entry.name.startswith("."):
                    self._skipped.append(f"{shown(name)}/: a hidden folder")
                else:
                    yield from self._walk(folder / entry.name, name + "/")
            else:
                self._confined(name)
                yield name

    def _confined(self, name: str) -> Path:
        """The real path of a file of this folder. Raises CheckpointError for a name or link that leaves it."""
        parts = PurePosixPath(name).parts
        where = f"{self.where}: the name '{shown(name)}'"
        if not parts or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
            raise CheckpointError(f"{where} leaves the folder", hint="do not trust this checkpoint")
        path = self.root
        for depth, part in enumerate(parts):
            path = path / part
            try:
                mode = path.lstat().st_mode
            except OSError as error:
                raise CheckpointError(f"{self.where}/{shown(name)} is missing ({error.strerror})") from None
            if stat.S_ISLNK(mode):
                path = self._blob(path, name)
                mode = path.lstat().st_mode
            expected = stat.S_ISREG(mode) if depth == len(parts) - 1 else stat.S_ISDIR(mode)
            if not expected:
                raise CheckpointError(f"{self.where}/{shown(name)} is not a regular file")
        return path

    def _blob(self, link: Path, name: str) -> Path:
        target = Path(os.path.realpath(link))
        if self._blobs is None or target.parent != self._blobs or not target.is_file():
            raise CheckpointError(
                f"{self.where}/{shown(name)} is a link to {target}; links are followed only inside a Hub cache",
                hint="copy the file into the folder",
            )
        return target


def local_path(source: str | os.PathLike[str] | Storage) -> Path | None:
    """Where a source is on this machine, as it was named; None for one that is read over the network."""
    if isinstance(source, str | os.PathLike):
        return Path(source)
    if isinstance(source, LocalFileStorage):
        return source.given
    return source.root if isinstance(source, LocalFolderStorage) else getattr(source, "given", None)


def hub_cache_blobs(folder: Path) -> Path | None:
    """The ``blobs`` folder that belongs to a snapshot of a Hub cache (``.../snapshots/<revision>[/...]``), or None."""
    for parent in folder.parents:
        if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
            return (parent.parent / "blobs").resolve()
    return None


def _hub_label(folder: Path, blobs: Path | None) -> str | None:
    """``org/name@commit`` of a folder ``models--org--name/snapshots/commit``; only the name of one deeper inside."""
    if blobs is None:
        return None
    _, *repository = blobs.parent.name.split("--")
    whole = folder.parent.name == "snapshots" and len(repository) == 2
    return f"{'/'.join(repository)}@{folder.name}" if whole else blobs.parent.name.split("--")[-1]


def hub_label(file: Path) -> str | None:
    """``org/name@commit`` of a file in a snapshot of a Hub cache, else None."""
    for folder in file.absolute().parents:
        if folder.parent.name == "snapshots":
            return _hub_label(folder, hub_cache_blobs(folder))
    return None


def open_storage(source: str | os.PathLike[str]) -> Storage:
    """The storage behind a path. Raises CheckpointError where there is nothing, or nothing of use."""
    path = Path(source)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist", hint="give a .safetensors or .gguf file, or a folder that has one"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shown(path)} cannot be opened: {error}") from None
    if stat.S_ISDIR(mode):
        return LocalFolderStorage(path)
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is neither a regular file nor a folder")
    return LocalFileStorage(path)
