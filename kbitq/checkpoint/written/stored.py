"""Reading what kbitq wrote: the triples of a quantized checkpoint, found, checked against each other, and decoded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kbitq import ops
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor, open_checkpoint
from kbitq.checkpoint.source.recognise import is_kbitq
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.storage import Storage
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.errors import CheckpointError, FormatError
from kbitq.format import (
    ABSMAX_SUFFIX,
    CODEBOOK_SUFFIX,
    COMPANION_SUFFIXES,
    CONFIG_KEY,
    GUARD_DTYPE,
    GUARD_SHAPE,
    METADATA_KEY,
    PACKED_SUFFIX,
    WORD_BYTES,
    ShardMeta,
    TensorMeta,
    absmax_shape,
    block_count,
    companion_names,
    k_of_codebook,
    packed_shape,
    parse_quantization_config,
    parse_shard_meta,
    shape_of_packed,
    stored_dtype,
)


@dataclass(frozen=True)
class StoredTensor:
    """A quantized tensor on disk: what it was, and where its three parts are."""

    name: str
    meta: TensorMeta
    packed: SourceTensor
    absmax: SourceTensor
    codebook: SourceTensor


@dataclass
class QuantizedCheckpoint:
    """An opened quantized checkpoint. ``kept`` are the tensors stored as they were; the guard is in neither table."""

    checkpoint: Checkpoint
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    kept: dict[str, SourceTensor] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    guard: str | None = None


def open_quantized(source: str | os.PathLike[str] | Storage | Checkpoint) -> QuantizedCheckpoint:
    """Open a quantized file or folder and check every triple. Raises FormatError, which names the tensor."""
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if not is_kbitq(checkpoint):
        raise CheckpointError(
            f"{checkpoint.where} is not quantized by kbitq", remedy="quantize", data={"path": checkpoint.where}
        )
    meta, config = _metadata(checkpoint), _config(checkpoint)
    opened = QuantizedCheckpoint(checkpoint, reasons=meta.kept)
    names = _quantized_names(checkpoint, meta)
    parts = {part for name in names for part in companion_names(name)}
    for name in sorted(names, key=lambda n: _position(checkpoint, n)):
        opened.tensors[name] = _stored(checkpoint, name, meta.tensors.get(name), config)
    for name, tensor in checkpoint.tensors.items():
        if name in names:
            opened.guard = _checked_guard(checkpoint, tensor)
        elif name not in parts:
            opened.kept[name] = tensor
    return opened


def read_codebook(reader: TileReader, tensor: StoredTensor) -> torch.Tensor:
    """The float32 levels of a tensor. Raises FormatError where one is not finite."""
    raw = reader.read_bytes(tensor.codebook, 0, tensor.codebook.nbytes, "codebook")
    levels = raw.view(torch.float32).clone()
    if not bool(torch.isfinite(levels).all()):
        raise FormatError(f"{reader.checkpoint.describe(tensor.codebook)} has a level that is not finite")
    return levels


def read_span(reader: TileReader, tensor: StoredTensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed words and the scale bytes of a span, as matrices of the span's rows; overwritten by the next call."""
    blocks, words = span.blocks, tensor.meta.k
    packed = reader.read_bytes(
        tensor.packed, span.first_block * words * WORD_BYTES, blocks * words * WORD_BYTES, "packed"
    )
    absmax = reader.read_bytes(tensor.absmax, span.first_block, blocks, "absmax")
    per_row = block_count(span.cols)
    return packed.view(torch.int32).view(span.rows, per_row * words), absmax.view(span.rows, per_row)


def decode(reader: TileReader, tensor: StoredTensor, dtype: torch.dtype) -> Iterator[tuple[Span, torch.Tensor]]:
    """The values of a tensor, span by span, each rounded once to ``dtype`` (float64 is exact)."""
    codebook = read_codebook(reader, tensor)
    target = torch.float32 if dtype == torch.float64 else dtype
    for span in reader.matrix_spans(tensor.name, tensor.meta.shape, tensor.meta.dtype):
        packed, absmax = read_span(reader, tensor, span)
        yield span, ops.dequantize(packed, absmax, codebook, span.cols, target).to(dtype)


def _position(checkpoint: Checkpoint, name: str) -> tuple[str, str]:
    packed = checkpoint.tensors.get(name + PACKED_SUFFIX)
    return (packed.file if packed else "", name)


def _metadata(checkpoint: Checkpoint) -> ShardMeta:
    merged = ShardMeta()
    for file, header in checkpoint.headers.items():
        if METADATA_KEY in header.metadata:
            meta = parse_shard_meta(header.metadata[METADATA_KEY], checkpoint.file_where(file))
            merged.tensors.update(meta.tensors)
            merged.kept.update(meta.kept)
    return merged


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    raw = (checkpoint.config or {}).get(CONFIG_KEY)
    return parse_quantization_config(raw, f"{checkpoint.where}/config.json") if raw is not None else {}


def _quantized_names(checkpoint: Checkpoint, meta: ShardMeta) -> set[str]:
    """Names of the quantized tensors: those in the metadata, and those of which two parts are there."""
    counts: dict[str, int] = {}
    for name in checkpoint.tensors:
        for suffix in COMPANION_SUFFIXES:
            if name.endswith(suffix):
                stem = name.removesuffix(suffix)
                counts[stem] = counts.get(stem, 0) + 1
    return set(meta.tensors) | {stem for stem, count in counts.items() if count >= 2}


def _stored(checkpoint: Checkpoint, name: str, meta: TensorMeta | None, config: dict[str, Any]) -> StoredTensor:
    found = [checkpoint.tensors.get(part) for part in companion_names(name)]
    where = next((checkpoint.file_where(p.file) for p in found if p), checkpoint.where)

    def broken(what: str) -> FormatError:
        return FormatError(f"{where}: tensor {name}: {what}", hint="quantize the model again, or download it again")

    for part, suffix in zip(found, COMPANION_SUFFIXES, strict=True):
        if part is None:
            raise broken(f"its part {name}{suffix} is missing")
    packed, absmax, codebook = (p for p in found if p is not None)
    k = k_of_codebook(f"{where}: {name}", codebook.shape)
    for part, dtype in ((packed, "I32"), (absmax, "U8"), (codebook, "F32")):
        if part.dtype != dtype:
            raise broken(f"{part.name} is {part.dtype}, not {dtype}")
    if meta is None:
        meta = _meta_from_config(name, k, packed, config, broken)
    if meta.k != k:
        raise broken(f"its metadata says K = {meta.k}, its codebook has 2^{k} levels")
    if stored_dtype(meta.dtype).kind != "float" or len(meta.shape) < 2 or 0 in meta.shape:
        raise broken(f"a {meta.dtype} tensor of shape {list(meta.shape)} is never quantized")
    if packed.shape != packed_shape(name, meta.shape, k) or absmax.shape != absmax_shape(name, meta.shape):
        raise broken(
            f"{PACKED_SUFFIX} {list(packed.shape)}, {ABSMAX_SUFFIX} {list(absmax.shape)} and {CODEBOOK_SUFFIX} "
            f"{list(codebook.shape)} do not fit the shape {list(meta.shape)}"
        )
    return StoredTensor(name, replace(meta), packed, absmax, codebook)


def _meta_from_config(name: str, k: int, packed: SourceTensor, config: dict[str, Any], broken: Any) -> TensorMeta:
    """Shape and dtype where the metadata was lost (a file saved again by another tool)."""
    dtypes = config.get("dtypes")
    dtype = dtypes.get(name, config.get("dtype")) if isinstance(dtypes, dict) else config.get("dtype")
    if not isinstance(dtype, str):
        raise broken("neither the file's metadata nor config.json says what it was")
    shape = config.get("shapes", {}).get(name)
    if shape is None:
        if not packed.shape or packed.shape[-1] % k:
            raise broken(f"its packed shape {list(packed.shape)} does not fit K = {k}")
        shape = shape_of_packed(name, k, packed.shape)
    return TensorMeta(k, tuple(shape), dtype, "unknown", "unknown")


def _checked_guard(checkpoint: Checkpoint, tensor: SourceTensor) -> str:
    if (tensor.dtype, tensor.shape) != (GUARD_DTYPE, GUARD_SHAPE):
        raise FormatError(f"{checkpoint.describe(tensor)} is there both quantized and plain")
    return tensor.name
