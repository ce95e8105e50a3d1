"""``load_file`` and ``save_file``: quantized safetensors in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from kbitq.checkpoint.output.file_writer import FileWriter
from kbitq.checkpoint.output.layout import Group, Shard
from kbitq.checkpoint.output.staging import Staging
from kbitq.checkpoint.source.open import SourceTensor, open_checkpoint
from kbitq.checkpoint.source.recognise import is_kbitq
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.stored import StoredTensor, open_quantized, read_constants
from kbitq.codecs.base import coded_entries, part_names
from kbitq.errors import CheckpointError
from kbitq.format import METADATA_KEY, Entry, ShardMeta, TensorMeta, place
from kbitq.ops.dtypes import STORED_NAMES, TORCH_DTYPES
from kbitq.quantized import QuantizedTensor


def load_file(path: str | Path) -> dict[str, torch.Tensor | QuantizedTensor]:
    """All tensors of a safetensors file or folder, on the CPU; quantized ones as ``QuantizedTensor`` by source name.

    Raises:
        CheckpointError: the path cannot be used, or a tensor has a dtype that torch lacks; FormatError.
    """
    checkpoint = open_checkpoint(path)
    with TileReader(checkpoint) as reader:
        if not is_kbitq(checkpoint):
            return {name: _load(reader, tensor) for name, tensor in checkpoint.tensors.items()}
        opened = open_quantized(checkpoint)
        loaded: dict[str, torch.Tensor | QuantizedTensor] = {
            name: _load_quantized(reader, tensor) for name, tensor in opened.tensors.items()
        }
        loaded.update((name, _load(reader, tensor)) for name, tensor in opened.kept.items())
        return loaded


def save_file(
    tensors: Mapping[str, torch.Tensor | QuantizedTensor], path: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to one safetensors file, quantized ones as format.md says. An existing file is replaced whole.

    Args:
        tensors: by name; on any device.
        path: the file.
        metadata: further strings for the file's ``__metadata__``.

    Raises:
        ValueError: a name of ``metadata`` is kbitq's own; NoSpaceError;
            CheckpointError: a dtype or a name cannot be stored.
    """
    if metadata and METADATA_KEY in metadata:
        raise ValueError(f"metadata: the key {METADATA_KEY!r} is written by kbitq")
    target, groups = Path(path), []
    data: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        group, parts = _group(name, tensor)
        groups.append(group)
        if clash := data.keys() & parts.keys():
            raise CheckpointError(f"{target}: two tensors would be stored as {sorted(clash)[0]}")
        data.update(parts)
    meta = ShardMeta({n: m for g in groups for n, m in g.meta.tensors.items()})
    shard = Shard(target.name, place(e for g in groups for e in g.entries), meta, metadata)
    with Staging(target) as staging:
        try:
            staging.clear()
            staging.check_space(shard.nbytes)
            with FileWriter(staging.path(shard.name), shard.nbytes) as writer:
                writer.write(0, shard.header())
                for name, offset in shard.offsets.items():
                    writer.write(offset, data[name].detach().cpu().contiguous())
                writer.sync()
            staging.publish_file(shard.name)
        except BaseException:
            staging.discard()
            raise


def _load(reader: TileReader, tensor: SourceTensor) -> torch.Tensor:
    if tensor.dtype not in TORCH_DTYPES:
        raise CheckpointError(f"{reader.checkpoint.describe(tensor)} is {tensor.dtype}, which torch has no dtype for")
    out = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
    flat = out.reshape(-1).view(torch.uint8)
    for start, data in reader.chunks(tensor):
        flat[start : start + data.numel()] = data
    return out


def _load_quantized(reader: TileReader, tensor: StoredTensor) -> QuantizedTensor:
    meta = tensor.meta
    parts = {name: _load(reader, part) for name, part in tensor.parts.items()}
    parts.update(read_constants(reader, tensor))
    return QuantizedTensor(
        parts, meta.shape, TORCH_DTYPES[meta.dtype], meta.k, meta.scale, meta.codebook, meta.sqnr_db, meta.max_abs_err,
        meta.codec,
    )  # fmt: skip


def _group(name: str, tensor: torch.Tensor | QuantizedTensor) -> tuple[Group, dict[str, torch.Tensor]]:
    if isinstance(tensor, QuantizedTensor):
        meta = TensorMeta(
            tensor.k, tuple(tensor.shape), _stored_name(name, tensor.dtype), tensor.scale, tensor.codebook_name,
            tensor.sqnr_db, tensor.max_abs_err, codec=tensor.codec,
        )  # fmt: skip
        parts = {stored: tensor.parts[part] for part, stored in part_names(tensor.codec, name).items()}
        entries = coded_entries(tensor.codec, name, meta.shape, meta.k)
        for entry in entries:
            part = parts[entry.name]
            if tuple(part.shape) != entry.shape or _stored_name(name, part.dtype) != entry.dtype:
                raise CheckpointError(f"tensor {name}: its {entry.name} is {part.dtype} {list(part.shape)}")
        return Group(entries, ShardMeta({name: meta})), parts
    return Group([Entry(name, _stored_name(name, tensor.dtype), tuple(tensor.shape))]), {name: tensor}


def _stored_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in STORED_NAMES:
        raise CheckpointError(f"tensor {name}: safetensors has no dtype for {dtype}")
    return STORED_NAMES[dtype]
