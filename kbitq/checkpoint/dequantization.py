"""``dequantize_checkpoint``: back to an ordinary checkpoint with the source's names, shapes and dtypes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from kbitq.card import source_text
from kbitq.checkpoint.output.destination import check_destination, is_file_name
from kbitq.checkpoint.output.file_writer import FileWriter
from kbitq.checkpoint.output.folder import (
    copy_carried,
    copy_tensor,
    json_text,
    read_readme,
    without_quantization,
    write_index,
)
from kbitq.checkpoint.output.layout import DEFAULT_SHARD_BYTES, Group, Shard, lay_out
from kbitq.checkpoint.output.staging import Staging, remove_leftovers
from kbitq.checkpoint.plan.totals import kept_row, quantized_row, totals
from kbitq.checkpoint.quantization import RunReport
from kbitq.checkpoint.source.open import SourceTensor, open_checkpoint
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.recognise import is_kbitq, prepare_source
from kbitq.checkpoint.source.side_files import CARD_FILE
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.stored import QuantizedCheckpoint, StoredTensor, decode, open_quantized
from kbitq.errors import CheckpointError, KbitqError
from kbitq.format import CONFIG_FILE, Entry, element_count, stored_dtype, tensor_nbytes
from kbitq.ops.dtypes import TORCH_DTYPES

DTYPE_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def dequantize_checkpoint(
    path: str | Path,
    out: str | Path,
    dtype: str | None = None,
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
) -> RunReport:
    """Write ``path`` as an ordinary checkpoint: exactly the values of the decode rule, rounded once.

    Args:
        path: a file or folder that kbitq quantized, or one in another tool's format that ``quantize`` takes.
        out: a ``.safetensors`` file (for a checkpoint of one file) or a folder.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64`` for the quantized tensors; None: each one's own.
            Tensors that were kept stay as they are.
        force: replace an output that kbitq wrote.
        progress: called after each tile.
        max_shard_size: bytes of data in a file of a folder.

    Raises:
        FormatError: the checkpoint breaks the format; OutputExistsError; NoSpaceError; CheckpointError: anything else,
            a value beyond the range of ``dtype`` included.
    """
    started = time.monotonic()
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise KbitqError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {dtype!r}")
    opened, target = _open(path), Path(out)
    if not force:
        remove_leftovers(target)
    check_destination(opened.checkpoint, target, force, is_file=is_file_name(target))
    if dtype is not None:
        opened.tensors = {n: _with_dtype(t, DTYPE_NAMES[dtype]) for n, t in opened.tensors.items()}
    shards, stem = _lay_out(opened, target, max_shard_size, dtype)
    with Staging(target) as staging:
        try:
            staging.clear()
            staging.check_space(sum(s.nbytes for s in shards))
            _write(opened, shards, staging, progress, dtype)
            _finish(opened, shards, stem, staging, target, force)
        except BaseException:
            staging.discard()
            raise
    return _report(opened, target, time.monotonic() - started, dtype)


def _open(path: str | Path) -> QuantizedCheckpoint:
    """A checkpoint that kbitq wrote; or one in another tool's format, all of whose tensors count as kept."""
    checkpoint = open_checkpoint(path)
    if is_kbitq(checkpoint):
        return open_quantized(checkpoint)
    prepare_source(checkpoint)
    if not any(map(_decodes, checkpoint.tensors.values())):
        return open_quantized(checkpoint)  # which says that it is not quantized
    return QuantizedCheckpoint(checkpoint, kept=dict(checkpoint.tensors))


def _decodes(tensor: SourceTensor) -> bool:
    return tensor.foreign is not None or tensor.scaling is not None


def _written_dtype(tensor: SourceTensor, dtype: str | None) -> str:
    """The dtype that a kept tensor gets: its own, or ``dtype`` for a matrix of another tool's format."""
    return DTYPE_NAMES[dtype] if dtype is not None and _decodes(tensor) and len(tensor.shape) > 1 else tensor.dtype


def _with_dtype(tensor: StoredTensor, dtype: str) -> StoredTensor:
    return replace(tensor, meta=replace(tensor.meta, dtype=dtype))


def _lay_out(
    opened: QuantizedCheckpoint, target: Path, max_shard_size: int, dtype: str | None
) -> tuple[list[Shard], str]:
    groups = [(t.file, Entry(t.name, t.meta.dtype, t.meta.shape)) for t in opened.tensors.values()]
    groups += [(t.file, _entry(t, dtype)) for t in opened.kept.values()]
    groups.sort(key=lambda g: (g[0], g[1].name))
    one_file = is_file_name(target)
    stem = target.name.removesuffix(".safetensors") if one_file else opened.checkpoint.stem
    if opened.checkpoint.storage.single and not one_file:
        stem = "model"
    return lay_out([Group([e]) for _, e in groups], stem, None if one_file else max_shard_size, kbitq=False), stem


def _entry(tensor: SourceTensor, dtype: str | None) -> Entry:
    written = _written_dtype(tensor, dtype)
    nbytes = tensor_nbytes(written, tensor.shape) if _decodes(tensor) else tensor.nbytes
    return Entry(tensor.name, written, tensor.shape, nbytes)


def _write(
    opened: QuantizedCheckpoint,
    shards: list[Shard],
    staging: Staging,
    progress: Callable[[Progress], None] | None,
    dtype: str | None,
) -> None:
    meter = ProgressMeter(progress, sum(s.data_nbytes for s in shards))
    with TileReader(opened.checkpoint) as reader:
        for shard in shards:
            with FileWriter(staging.path(shard.name), shard.nbytes) as writer:
                writer.write(0, shard.header())
                for name in sorted(shard.offsets):
                    offset, kept = shard.offsets[name], opened.kept.get(name)
                    if kept is None:
                        tensor = opened.tensors[name]
                        found = decode(reader, tensor, TORCH_DTYPES[tensor.meta.dtype])
                        _write_values(reader, name, tensor.meta.dtype, found, offset, writer, meter)
                    elif _decodes(kept) and len(kept.shape) > 1:
                        written = _written_dtype(kept, dtype)
                        found = ((span, reader.read(kept, span)) for span in reader.spans(kept))
                        _write_values(reader, name, written, found, offset, writer, meter)
                    else:
                        copy_tensor(reader, kept, offset, writer, meter)
                writer.sync()
        reader.check_unchanged()


def _write_values(
    reader: TileReader,
    name: str,
    dtype: str,
    found: Iterator[tuple[Span, torch.Tensor]],
    offset: int,
    writer: FileWriter,
    meter: ProgressMeter,
) -> None:
    size = stored_dtype(dtype).bits // 8
    for span, decoded in found:
        values = decoded.to(TORCH_DTYPES[dtype])
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{reader.checkpoint.where}: tensor {name} has values too large for {dtype}",
                hint="leave dtype away, or use float32 or bfloat16",
                remedy="dtype",
            )
        writer.write(offset + span.first_element * size, values.contiguous())
        meter.add(span.numel * size, name)


def _finish(
    opened: QuantizedCheckpoint, shards: list[Shard], stem: str, staging: Staging, target: Path, force: bool
) -> None:
    if is_file_name(target):
        staging.publish_file(shards[0].name)
        return
    copy_carried(opened.checkpoint, staging, but=CARD_FILE)
    if (readme := read_readme(opened.checkpoint)) and (text := source_text(readme)) is not None:
        staging.write_file(CARD_FILE, text.encode())
    write_index(shards, stem, staging)
    # A config that held nothing else was made by kbitq, for a source that had none.
    if config := without_quantization(opened.checkpoint.config):
        staging.write_file(CONFIG_FILE, json_text(config))
    staging.publish_folder(replace=force)


def _report(opened: QuantizedCheckpoint, target: Path, seconds: float, dtype: str | None) -> RunReport:
    rows = []
    for name, tensor in opened.tensors.items():
        row = quantized_row(name, tensor.meta)
        row["bytes"] = element_count(tensor.meta.shape) * stored_dtype(tensor.meta.dtype).bits // 8
        rows.append(row)
    for name, kept in opened.kept.items():
        entry = _entry(kept, dtype)
        rows.append(kept_row(name, opened.reasons.get(name, ""), kept.shape, entry.dtype, entry.nbytes or 0))
    summary = totals(rows, opened.checkpoint.nbytes, None)
    return RunReport(target, summary, rows, seconds, list(opened.checkpoint.notes))
