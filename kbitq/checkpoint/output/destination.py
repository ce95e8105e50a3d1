"""Where an output goes: its default name, and what is refused before work starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kbitq.checkpoint.output.same_place import is_or_lies_in
from kbitq.checkpoint.source.open import Checkpoint
from kbitq.checkpoint.source.side_files import CARD_FILE, INDEX_SUFFIX, WEIGHTS_SUFFIX, WRITTEN_BY_KBITQ
from kbitq.checkpoint.source.storage import LocalFileStorage, LocalFolderStorage, Storage, local_path
from kbitq.errors import CheckpointError, OutputExistsError


def default_output(storage: Storage, label: str, *, folder: bool = False) -> Path:
    """``NAME-label.safetensors`` or ``NAME-label`` beside the source; of a Hub cache, in the current folder.

    ``folder``: the latter for a file too.
    """
    if isinstance(storage, LocalFileStorage):
        return storage.given.parent / f"{storage.name}-{label}{'' if folder else '.safetensors'}"
    if isinstance(storage, LocalFolderStorage) and not storage.in_hub_cache:
        return storage.root.parent / f"{storage.name}-{label}"
    return Path(f"{storage.name}-{label}")


def check_destination(
    checkpoint: Checkpoint, out: Path, force: bool, *, is_file: bool, marker: str | None = None
) -> None:
    """Raise OutputExistsError or CheckpointError where ``out`` is taken, or does not fit the source.

    ``marker`` is a file that every such output has: a folder without it is somebody's own and is never replaced.
    """
    source = local_path(checkpoint.storage)
    if source is not None and is_or_lies_in(source, out):
        raise CheckpointError(f"{out} is or holds the source", hint="choose another output", remedy="another-output")
    if source is not None and is_or_lies_in(out, source):
        raise CheckpointError(
            f"{out} lies in the source folder", hint="choose an output outside it", remedy="output-outside"
        )
    if is_file and len(checkpoint.headers) > 1:
        raise CheckpointError(
            f"{checkpoint.where} has {len(checkpoint.headers)} weight files, so {out} cannot be one file",
            hint="an output whose name does not end in .safetensors is a folder",
            remedy="folder",
            data={"out": str(out).removesuffix(".safetensors")},
        )
    if os.path.lexists(out):
        _check_replaceable(checkpoint, out, force, is_file=is_file, marker=marker)


def _check_replaceable(checkpoint: Checkpoint, out: Path, force: bool, *, is_file: bool, marker: str | None) -> None:
    """An empty folder is free to use. With ``force`` a file may be replaced, or a folder that is such an output."""
    if out.is_symlink():
        raise OutputExistsError(f"{out} is a link", hint="give the place it leads to, or remove it")
    if is_file != out.is_file():
        raise OutputExistsError(
            f"{out} exists and is {'a folder' if is_file else 'a file'}", hint="choose another output"
        )
    if out.is_dir() and os.path.ismount(out):
        raise OutputExistsError(
            f"{out} is a mount point and cannot be replaced",
            hint="choose a folder below it",
            remedy="below",
            data={"out": out},
        )
    if out.is_dir() and not any(out.iterdir()):
        return
    if not force:
        raise OutputExistsError(f"{out} exists", hint="force=True replaces it, or choose another name", remedy="exists")
    if out.is_dir() and marker is not None and not (out / marker).is_file():
        raise OutputExistsError(
            f"{out} exists and was not written by kbitq: it has no {marker}",
            hint="remove the folder yourself, or choose another output",
            remedy="not-ours",
        )
    if out.is_dir() and (strange := _foreign_file(checkpoint, out, marker)):
        # Replacing a folder removes it: never one that holds anything an output would not.
        raise OutputExistsError(
            f"{out} exists and holds {strange}, which is not part of such an output",
            hint="remove the folder yourself, or choose another output",
            remedy="not-ours",
        )


def _foreign_file(checkpoint: Checkpoint, folder: Path, marker: str | None) -> str | None:
    """A file in ``folder`` that no output made from this source has, or None."""
    expected = {*checkpoint.carried, *WRITTEN_BY_KBITQ, CARD_FILE, marker}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        weights = "/" not in name and name.endswith((WEIGHTS_SUFFIX, INDEX_SUFFIX))
        if not path.is_dir() and name not in expected and not weights:
            return name
    return None


def disk_free(out: Path) -> int:
    """Bytes free on the disk that ``out`` will be on."""
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def is_file_name(out: Path) -> bool:
    """Whether an output path means one file and not a folder."""
    return out.name.endswith(".safetensors")
