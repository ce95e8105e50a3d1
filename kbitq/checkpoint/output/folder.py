"""What a folder holds beside its weights: files carried over, index, checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kbitq.checkpoint.output.checksums import format_checksums, sha256
from kbitq.checkpoint.output.file_writer import FileWriter
from kbitq.checkpoint.output.layout import Shard, index_json, index_name
from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.side_files import CARD_FILE, NOT_SUMMED, SUMS_FILE
from kbitq.checkpoint.source.storage import read_all
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.format import CONFIG_KEY, unguarded_config


def copy_tensor(
    reader: TileReader, tensor: SourceTensor, offset: int, writer: FileWriter, meter: ProgressMeter
) -> None:
    """Copy a tensor byte for byte to ``offset`` of a file."""
    for start, data in reader.chunks(tensor):
        writer.write(offset + start, data)
        meter.add(data.numel(), tensor.name)


_COPY_BYTES = 1 << 20
_MAX_README_BYTES = 1 << 20


def copy_carried(checkpoint: Checkpoint, staging: Staging, *, but: str | None = None) -> None:
    """Copy the files that go with the weights, all ``but`` one."""
    for name in checkpoint.carried:
        if name == but:
            continue
        file = checkpoint.storage.open(name)
        try:
            with FileWriter(staging.path(name), file.size) as writer:
                for start in range(0, file.size, _COPY_BYTES):
                    data = bytearray(min(_COPY_BYTES, file.size - start))
                    file.read_into(memoryview(data), start)
                    writer.write(start, bytes(data))
                writer.sync()
        finally:
            file.close()


def read_readme(checkpoint: Checkpoint) -> str | None:
    """The README.md that goes with the weights; None if there is none, or one too long for a page."""
    if checkpoint.carried_sizes.get(CARD_FILE, _MAX_README_BYTES + 1) > _MAX_README_BYTES:
        return None
    return read_all(checkpoint.storage, CARD_FILE, _MAX_README_BYTES).decode("utf-8", "replace")


def write_index(shards: Sequence[Shard], stem: str, staging: Staging) -> None:
    """Write the index that several shards need."""
    if len(shards) > 1:
        staging.write_file(index_name(stem), index_json(shards).encode())


def write_checksums(staging: Staging, digests: Mapping[str, str]) -> None:
    """Write SHA256SUMS over the files of the output, as ``sha256sum -c`` reads it; ``digests`` are known already."""
    names = [p.relative_to(staging.output).as_posix() for p in staging.output.rglob("*") if p.is_file()]
    whole = {n: digests.get(n) or sha256(staging.output / n) for n in names if n not in NOT_SUMMED}
    staging.write_file(SUMS_FILE, format_checksums(whole))


def json_text(value: Any) -> bytes:
    """JSON as transformers writes it to files: indented, a newline at the end; keys in the order given."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def without_quantization(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """A config.json without ``quantization_config``, at its top and in the parts of a composite model, nor guard."""
    parts = {key: value for key, value in unguarded_config(config or {}).items() if key != CONFIG_KEY}
    for key, value in parts.items():
        if isinstance(value, dict) and key.endswith("_config") and CONFIG_KEY in value:
            parts[key] = {k: v for k, v in value.items() if k != CONFIG_KEY}
    return parts
