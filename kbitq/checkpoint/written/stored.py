"""Reading what kbitq wrote: the triples of a quantized checkpoint, found, checked against each other, and decoded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kbitq.checkpoint.source.open import Checkpoint, SourceTensor, open_checkpoint
from kbitq.checkpoint.source.recognise import is_kbitq
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.storage import Storage
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.output_check import find_output
from kbitq.codecs.base import Codec, any_parts, get_codec, part_name, part_names
from kbitq.errors import CheckpointError, FormatError
from kbitq.format import (
    COMPANION_SUFFIXES,
    CONFIG_KEY,
    GUARD_DTYPE,
    GUARD_SHAPE,
    METADATA_KEY,
    PACKED_SUFFIX,
    ShardMeta,
    TensorMeta,
    config_codec,
    parse_quantization_config,
    parse_shard_meta,
    stored_dtype,
)
from kbitq.ops.dtypes import TORCH_DTYPES


@dataclass(frozen=True)
class StoredTensor:
    """A quantized tensor on disk: what it was, and where its parts are, by name."""

    name: str
    meta: TensorMeta
    parts: dict[str, SourceTensor]

    @property
    def codec(self) -> Codec:
        return get_codec(self.meta.codec)

    @property
    def nbytes(self) -> int:
        """Bytes of all its parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def file(self) -> str:
        """Where its first part is."""
        return next(iter(self.parts.values())).file


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
        if (output := find_output(checkpoint)) is not None:
            raise CheckpointError(
                f"{checkpoint.where} is in the format {output.format} of other tools, and this is for kbitq's own",
                hint="inspect has a table of it, dequantize makes an ordinary checkpoint of it",
                remedy="other-format",
                data={"path": checkpoint.where},
            )
        raise CheckpointError(
            f"{checkpoint.where} is not quantized by kbitq", remedy="quantize", data={"path": checkpoint.where}
        )
    meta, config = _metadata(checkpoint), _config(checkpoint)
    opened = QuantizedCheckpoint(checkpoint, reasons=meta.kept)
    names = _quantized_names(checkpoint, meta)
    parts: set[str] = set()
    for name in sorted(names, key=lambda n: _position(checkpoint, n)):
        stored = _stored(checkpoint, name, meta.tensors.get(name), config)
        opened.tensors[name] = stored
        parts.update(part.name for part in stored.parts.values())
    for name, tensor in checkpoint.tensors.items():
        if name in names:
            opened.guard = _checked_guard(checkpoint, tensor)
        elif name not in parts:
            opened.kept[name] = tensor
    return opened


def read_constants(reader: TileReader, tensor: StoredTensor) -> dict[str, torch.Tensor]:
    """The parts of a tensor that are not cut with it (its codebook). Raises FormatError for one not to be used."""
    found: dict[str, torch.Tensor] = {}
    for part in tensor.codec.parts(tensor.name, tensor.meta.shape, tensor.meta.k):
        if part.constant:
            stored = tensor.parts[part.name]
            raw = reader.read_bytes(stored, 0, stored.nbytes, part.name)
            found[part.name] = raw.view(TORCH_DTYPES[part.dtype]).view(part.shape).clone()
            tensor.codec.check({part.name: found[part.name]}, reader.checkpoint.describe(stored))
    return found


def read_span(
    reader: TileReader, tensor: StoredTensor, span: Span, constants: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parts of a span, as matrices of the span's rows; what is no constant is overwritten by the next call."""
    found, places = dict(constants), tensor.codec.place(span, tensor.meta.k)
    for part in tensor.codec.parts("", (span.rows, span.cols), tensor.meta.k):
        if not part.constant:
            raw = reader.read_bytes(tensor.parts[part.name], places[part.name], part.nbytes, part.name)
            found[part.name] = raw.view(TORCH_DTYPES[part.dtype]).view(part.shape)
    return found


def decode(reader: TileReader, tensor: StoredTensor, dtype: torch.dtype) -> Iterator[tuple[Span, torch.Tensor]]:
    """The values of a tensor, span by span, each rounded once to ``dtype`` (float64 is exact)."""
    constants = read_constants(reader, tensor)
    target = torch.float32 if dtype == torch.float64 else dtype
    for span in reader.matrix_spans(tensor.name, tensor.meta.shape, tensor.meta.dtype, cut=tensor.codec.cut):
        parts = read_span(reader, tensor, span, constants)
        yield span, tensor.codec.decode(parts, span.cols, target).to(dtype)


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
    """Names of the quantized tensors: those in the metadata, and those of which two parts are there.

    Only the default codec's parts are looked for: metadata names the tensors of any other.
    """
    counts: dict[str, int] = {}
    for name in checkpoint.tensors:
        for suffix in COMPANION_SUFFIXES:
            if name.endswith(suffix):
                stem = name.removesuffix(suffix)
                counts[stem] = counts.get(stem, 0) + 1
    return set(meta.tensors) | {stem for stem, count in counts.items() if count >= 2}


def _stored(checkpoint: Checkpoint, name: str, meta: TensorMeta | None, config: dict[str, Any]) -> StoredTensor:
    """A quantized tensor, its parts held against each other and against what is said of it."""
    codec = get_codec(meta.codec if meta is not None else config_codec(config, name))
    found = {part: checkpoint.tensors.get(stored) for part, stored in part_names(codec.name, name).items()}
    where = next((checkpoint.file_where(p.file) for p in found.values() if p), checkpoint.where)

    def broken(what: str) -> FormatError:
        return FormatError(f"{where}: tensor {name}: {what}", hint="quantize the model again, or download it again")

    parts = {part: tensor for part, tensor in found.items() if tensor is not None}
    for wanted in any_parts(codec.name):
        if wanted.name not in parts:
            raise broken(f"its part {part_name(name, wanted)} is missing")
    shapes = {part: tensor.shape for part, tensor in parts.items()}
    k = codec.k_of(f"{where}: {name}", shapes)
    for wanted in any_parts(codec.name):
        if parts[wanted.name].dtype != wanted.dtype:
            raise broken(f"{parts[wanted.name].name} is {parts[wanted.name].dtype}, not {wanted.dtype}")
    if meta is None:
        meta = _meta_from_config(name, k, codec, shapes, config, broken)
    if meta.k != k:
        raise broken(f"its metadata says K = {meta.k}, its parts are of K = {k}")
    if stored_dtype(meta.dtype).kind != "float" or len(meta.shape) < 2 or 0 in meta.shape:
        raise broken(f"a {meta.dtype} tensor of shape {list(meta.shape)} is never quantized")
    if any(shapes[part.name] != part.shape for part in codec.parts(name, meta.shape, k)):
        *some, last = (f"_{part} {list(shape)}" for part, shape in shapes.items())
        raise broken(f"{', '.join(some)} and {last} do not fit the shape {list(meta.shape)}")
    return StoredTensor(name, replace(meta), parts)


def _meta_from_config(
    name: str, k: int, codec: Codec, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], broken: Any
) -> TensorMeta:
    """Shape and dtype where the metadata was lost (a file saved again by another tool)."""
    dtypes = config.get("dtypes")
    dtype = dtypes.get(name, config.get("dtype")) if isinstance(dtypes, dict) else config.get("dtype")
    if not isinstance(dtype, str):
        raise broken("neither the file's metadata nor config.json says what it was")
    shape = config.get("shapes", {}).get(name)
    if shape is None:
        try:
            shape = codec.shape_of(name, k, shapes)
        except FormatError as error:
            raise broken(str(error)) from None
    return TensorMeta(k, tuple(shape), dtype, "unknown", "unknown", codec=codec.name)


def _checked_guard(checkpoint: Checkpoint, tensor: SourceTensor) -> str:
    if (tensor.dtype, tensor.shape) != (GUARD_DTYPE, GUARD_SHAPE):
        raise FormatError(f"{checkpoint.describe(tensor)} is there both quantized and plain")
    return tensor.name
