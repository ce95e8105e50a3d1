"""Files that a command writes besides a checkpoint (a recipe, a page): what they may never touch.

An option that names such a file is checked before work starts with ``check_extra_output`` and written with
``write_extra_output``, which checks again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from kbitq.checkpoint.output.file_writer import writing
from kbitq.checkpoint.output.same_place import identity, is_or_lies_in
from kbitq.checkpoint.output.staging import working_folders
from kbitq.checkpoint.source.storage import Storage, hub_cache_blobs, local_path
from kbitq.errors import CheckpointError, OutputExistsError

Place = str | os.PathLike[str] | Storage
_OTHER_NAME = "choose another name"


def check_extra_output(path: str | Path, inputs: Iterable[Place], out: Path | None = None, *, force: bool) -> None:
    """Raise unless the file ``path`` can be written without touching what is read or what else is written.

    Args:
        path: the file to be written.
        inputs: files and folders that are read, or storages; one that is not on this machine is no obstacle.
        out: the checkpoint that is written too: a file or a folder.
        force: an existing file may be replaced.

    Raises:
        CheckpointError: ``path`` is, lies in or holds one of ``inputs``, or cannot be written.
        OutputExistsError: there is something at ``path`` that may not be replaced.
    """
    path = Path(path)
    check_apart_from_inputs(path, inputs)
    if out is not None:
        for place in (out, *working_folders(out)):
            if is_or_lies_in(path, place) or is_or_lies_in(place, path):
                told = "" if str(path) == str(out) else f", lies in or holds {out}, which is"
                raise CheckpointError(f"{path} is{told} the output", hint=_OTHER_NAME)
    _check_free(path, force)


def write_extra_output(
    path: str | Path, text: str, inputs: Iterable[Place], out: Path | None = None, *, force: bool
) -> None:
    """Write ``text`` in UTF-8 to the file ``path``, whole or not at all. Raises what ``check_extra_output`` raises."""
    check_extra_output(path, inputs, out, force=force)
    path, data = Path(path), text.encode()
    with writing(path):
        if _is_stream(path):
            path.write_bytes(data)
        elif force:
            beside = path.with_name(f".kbitq-{os.getpid()}")
            _write_new(beside, data, os.O_TRUNC)
            beside.replace(path)
        else:
            _write_new(path, data, os.O_EXCL)


def check_apart_from_inputs(path: Path, inputs: Iterable[Place]) -> None:
    """Raise CheckpointError where ``path``, a file or a folder, is, lies in or holds something that is read."""
    known = identity(path)
    for place in filter(None, map(local_path, inputs)):
        if is_or_lies_in(path, place):
            how = "lies in" if place.is_dir() else "is"
        elif is_or_lies_in(place, path):
            how = "holds"
        elif known is not None and known in _identities(place):
            how = "is a file of"
        else:
            continue
        told = "" if how == "is" and str(path) == str(place) else f" {how} {place}, which"
        raise CheckpointError(f"{path}{told} is read and must not change", hint=_OTHER_NAME)


def _identities(place: Path) -> Iterator[tuple[int, int]]:
    """The inodes of all files of a folder, which may have further names elsewhere, and of what its links lead to."""
    folders = [place, *filter(None, [hub_cache_blobs(Path(os.path.realpath(place)))])] if place.is_dir() else []
    for folder in folders:
        for root, _, files in os.walk(folder):
            yield from filter(None, (identity(Path(root, name)) for name in files))


def _check_free(path: Path, force: bool) -> None:
    """Raise unless nothing is at ``path``, or a regular file that may be replaced, or a pipe or terminal."""
    with writing(path):
        if not os.path.lexists(path):
            if not path.parent.is_dir():
                raise CheckpointError(f"{path} cannot be written: there is no folder {path.parent}")
            if not os.access(path.parent, os.W_OK | os.X_OK):
                raise CheckpointError(f"{path} cannot be written: its folder is read-only")
            return
        if _is_stream(path):
            return
        if path.is_symlink():
            raise OutputExistsError(f"{path} is a link", hint="give the place it leads to, or remove it")
        if not path.is_file():
            raise OutputExistsError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}", hint=_OTHER_NAME)
    if not force:
        raise OutputExistsError(
            f"{path} exists", hint="force=True replaces it, or choose another name", remedy="file-exists"
        )


def _is_stream(path: Path) -> bool:
    """Whether a path leads to something that is written to and not replaced, such as /dev/stderr or a FIFO."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _write_new(path: Path, data: bytes, how: int) -> None:
    """Write a file that is nobody else's; remove it again where that fails."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | how
    fd = os.open(path, flags, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
