"""``dequantize_checkpoint``: back to an ordinary checkpoint with the source's names, shapes and dtypes."""

from __future__ import annotations

import time
from collections.abc import Callable
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
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.side_files import CARD_FILE
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.stored import QuantizedCheckpoint, StoredTensor, decode, open_quantized
from kbitq.errors import CheckpointError, KbitqError
from kbitq.format import CONFIG_FILE, Entry, element_count, stored_dtype
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
        path: a quantized file or folder.
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
    opened, target = open_quantized(path), Path(out)
    if not force:
        remove_leftovers(target)
    check_destination(opened.checkpoint, target, force, is_file=is_file_name(target))
    if dtype is not None:
        opened.tensors = {n: _with_dtype(t, DTYPE_NAMES[dtype]) for n, t in opened.tensors.items()}
    shards, stem = _lay_out(opened, target, max_shard_size)
    with Staging(target) as staging:
        try:
            staging.clear()
            staging.check_space(sum(s.nbytes for s in shards))
            _write(opened, shards, staging, progress)
            _finish(opened, shards, stem, staging, target, force)
        except BaseException:
            staging.discard()
            raise
    return _report(opened, target, time.monotonic() - started)


def _with_dtype(tensor: StoredTensor, dtype: str) -> StoredTensor:
    return replace(tensor, meta=replace(tensor.meta, dtype=dtype))


def _lay_out(opened: QuantizedCheckpoint, target: Path, max_shard_size: int) -> tuple[list[Shard], str]:
    groups = [(t.file, Entry(t.name, t.meta.dtype, t.meta.shape)) for t in opened.tensors.values()]
    groups += [(t.file, Entry(t.name, t.dtype, t.shape, t.nbytes)) for t in opened.kept.values()]
    groups.sort(key=lambda g: (g[0], g[1].name))
    one_file = is_file_name(target)
    stem = target.name.removesuffix(".safetensors") if one_file else opened.checkpoint.stem
    if opened.checkpoint.storage.single and not one_file:
        stem = "model"
    return lay_out([Group([e]) for _, e in groups], stem, None if one_file else max_shard_size, kbitq=False), stem


def _write(
    opened: QuantizedCheckpoint, shards: list[Shard], staging: Staging, progress: Callable[[Progress], None] | None
) -> None:
    meter = ProgressMeter(progress, sum(s.data_nbytes for s in shards))
    with TileReader(opened.checkpoint) as reader:
        for shard in shards:
            with FileWriter(staging.path(shard.name), shard.nbytes) as writer:
                writer.write(0, shard.header())
                for name in sorted(shard.offsets):
                    if name in opened.kept:
                        copy_tensor(reader, opened.kept[name], shard.offsets[name], writer, meter)
                    else:
                        _write_decoded(reader, opened.tensors[name], shard.offsets[name], writer, meter)
                writer.sync()
        reader.check_unchanged()


def _write_decoded(
    reader: TileReader, tensor: StoredTensor, offset: int, writer: FileWriter, meter: ProgressMeter
) -> None:
    size = stored_dtype(tensor.meta.dtype).bits // 8
    for span, values in decode(reader, tensor, TORCH_DTYPES[tensor.meta.dtype]):
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{reader.checkpoint.where}: tensor {tensor.name} has values too large for {tensor.meta.dtype}",
                hint="leave dtype away, or use float32 or bfloat16",
                remedy="dtype",
            )
        writer.write(offset + span.first_element * size, values)
        meter.add(span.numel * size, tensor.name)


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


def _report(opened: QuantizedCheckpoint, target: Path, seconds: float) -> RunReport:
    rows = []
    for name, tensor in opened.tensors.items():
        row = quantized_row(name, tensor.meta)
        row["bytes"] = element_count(tensor.meta.shape) * stored_dtype(tensor.meta.dtype).bits // 8
        rows.append(row)
    rows += [kept_row(n, opened.reasons.get(n, ""), t.shape, t.dtype, t.nbytes) for n, t in opened.kept.items()]
    summary = totals(rows, opened.checkpoint.nbytes, None)
    return RunReport(target, summary, rows, seconds, list(opened.checkpoint.notes))
