"""``repair_index``: a folder's index written anew from the headers of its shards."""

from __future__ import annotations

from pathlib import Path

from kbitq.checkpoint.output.checksums import format_checksums, read_checksums, stored_digest
from kbitq.checkpoint.output.file_writer import FileWriter, sync_folder, writing
from kbitq.checkpoint.output.layout import format_index, index_name
from kbitq.checkpoint.source.open import numbered_shards, read_header
from kbitq.checkpoint.source.side_files import INDEX_SUFFIX, SUMS_FILE, WEIGHTS_SUFFIX, is_duplicate_weights
from kbitq.checkpoint.source.storage import LocalFolderStorage
from kbitq.errors import CheckpointError
from kbitq.text_safety import shown

_NEW_SUFFIX = ".kbitq-new"


def repair_index(path: str | Path) -> Path | None:
    """Rewrite the index of a folder from the headers of its shards, and its line in SHA256SUMS.

    Returns the index, or None for a folder of one file, which needs none (a stale one is removed).

    Raises:
        CheckpointError: the path is no folder, a shard of the set is missing, or a tensor is in two shards.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder, so it has no index")
    storage = LocalFolderStorage(folder)
    top = [n for n in storage.names() if "/" not in n]
    weights = [n for n in top if n.endswith(WEIGHTS_SUFFIX) and not is_duplicate_weights(n)]
    if not weights:
        raise CheckpointError(f"{folder} has no safetensors file")
    stem, files = numbered_shards(storage, weights) if len(weights) > 1 else ("", weights)
    index = None
    if len(files) > 1:
        index = folder / index_name(stem)
        weight_map, total = _weight_map(storage, files)
        _replace(index, format_index(weight_map, total).encode())
    stale = [n for n in top if n.endswith(INDEX_SUFFIX) and not is_duplicate_weights(n) and folder / n != index]
    for name in stale:
        with writing(folder / name):
            (folder / name).unlink()
    _update_checksums(storage, folder, index, stale, top)
    return index


def _weight_map(storage: LocalFolderStorage, files: list[str]) -> tuple[dict[str, str], int]:
    weight_map: dict[str, str] = {}
    total = 0
    for file in files:
        for tensor in read_header(storage, file)[0].tensors:
            if tensor.name in weight_map:
                raise CheckpointError(
                    f"{storage.where}: tensor {shown(tensor.name)} is in both {weight_map[tensor.name]} and {file}"
                )
            weight_map[tensor.name] = file
            total += tensor.nbytes
    return weight_map, total


def _update_checksums(
    storage: LocalFolderStorage, folder: Path, index: Path | None, stale: list[str], top: list[str]
) -> None:
    if SUMS_FILE not in top:
        return
    digests = {name: digest for name, digest in read_checksums(storage).items() if name not in stale}
    if index is not None:
        digests[index.name] = stored_digest(storage, index.name)
    _replace(folder / SUMS_FILE, format_checksums(digests))


def _replace(path: Path, data: bytes) -> None:
    """Write a file anew: beside, synced, renamed."""
    beside = path.with_name(path.name + _NEW_SUFFIX)
    with FileWriter(beside, len(data)) as writer:
        writer.write(0, data)
        writer.sync()
    with writing(path):
        beside.replace(path)
    sync_folder(path.parent)
