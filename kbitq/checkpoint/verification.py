"""``verify``: whether a quantized checkpoint is whole and says the truth; against its source, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kbitq.checkpoint.output.checksums import check_checksums
from kbitq.checkpoint.passes.run_state import ErrorSums
from kbitq.checkpoint.passes.tile_codec import Request, TileCodec
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor, open_checkpoint
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.recognise import is_kbitq, open_source
from kbitq.checkpoint.source.storage import Storage
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.compare import matching_source
from kbitq.checkpoint.written.stored import QuantizedCheckpoint, StoredTensor, open_quantized, read_constants, read_span
from kbitq.errors import CheckpointError, KbitqError
from kbitq.format import CONFIG_FILE, CONFIG_KEY, build_quantization_config, guard_name
from kbitq.quantized import sqnr_db
from kbitq.text_safety import shown

DEFAULT_SAMPLE = 8  # tensors that are quantized again, unless all are
_STATISTICS = (("sqnr_db", "%.4f"), ("max_abs_err", "%.6e"))


@dataclass
class VerifyReport:
    """What was checked and what is wrong. ``checks``: a sentence for each kind of check; ``problems``: one for each."""

    checks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "problems": self.problems, "checks": self.checks, "totals": self.totals}


def verify(
    path: str | os.PathLike[str] | Storage,
    source: str | os.PathLike[str] | Storage | None = None,
    *,
    full: bool = False,
    sample: int = DEFAULT_SAMPLE,
    progress: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Check a quantized file or folder: structure, values, checksums, and with ``source`` what it was made from.

    Args:
        path: a quantized file or folder.
        source: what it was quantized from; tensors are quantized again, and bytes and statistics compared.
        full: compare all tensors with the source; else ``sample`` of the quantized ones, evenly spaced by name.

    Returns:
        A report; ``ok`` says whether no problem was found.

    Raises:
        CheckpointError: there is nothing to check (a missing path, no checkpoint, no source).
    """
    checkpoint = open_checkpoint(path)
    if not is_kbitq(checkpoint):
        raise CheckpointError(
            f"{checkpoint.where} is not quantized by kbitq, so there is nothing to verify",
            remedy="quantize",
            data={"path": checkpoint.where},
        )
    report = VerifyReport()
    try:
        opened = open_quantized(checkpoint)
    except KbitqError as error:
        report.problems.append(str(error))
        return report
    _check_structure(opened, report)
    with TileReader(checkpoint) as reader:
        meter = ProgressMeter(progress, _bytes_to_read(checkpoint, opened))
        _check_values(opened, reader, report, meter)
        check_checksums(checkpoint, report.checks, report.problems, meter)
        if source is not None:
            _check_against(opened, reader, open_source(source), full, sample, report)
    return report


def _bytes_to_read(checkpoint: Checkpoint, opened: QuantizedCheckpoint) -> int:
    files = sum(f.size for f in checkpoint.fingerprints.values())
    scales = sum(part.nbytes for t in opened.tensors.values() for part in _scale_parts(t))
    return files + scales


def _scale_parts(tensor: StoredTensor) -> list[SourceTensor]:
    """The parts that hold the scales of blocks."""
    empty = torch.empty(0)
    return [part for name, part in tensor.parts.items() if tensor.codec.scale_counts(name, empty) is not None]


def _check_structure(opened: QuantizedCheckpoint, report: VerifyReport) -> None:
    """Index, config and guard against the files. (Triples, shapes and offsets were checked by opening.)"""
    checkpoint, problems = opened.checkpoint, report.problems
    report.checks.append(f"structure: {len(checkpoint.headers)} files, {len(opened.tensors)} quantized tensors, "
                         f"{len(opened.kept)} kept")  # fmt: skip
    if checkpoint.storage.single:
        return
    if checkpoint.index is not None:
        forgotten = [n for n in checkpoint.tensors if n not in checkpoint.weight_map]
        problems.extend(f"{checkpoint.index}: tensor {shown(n)} is not in it" for n in forgotten)
    elif len(checkpoint.headers) > 1:
        problems.append(f"{checkpoint.where}: there are {len(checkpoint.headers)} shards and no index")
    shapes = {n: t.meta.shape for n, t in opened.tensors.items()}
    if opened.guard != guard_name(shapes):
        problems.append(f"{checkpoint.where}: the guard tensor {guard_name(shapes)} is missing or misplaced")
    config = (checkpoint.config or {}).get(CONFIG_KEY)
    if not isinstance(config, dict):
        problems.append(f"{checkpoint.where}/{CONFIG_FILE} has no {CONFIG_KEY}: loaders will not know what this is")
        return
    expected = build_quantization_config({n: t.meta for n, t in opened.tensors.items()}, ())
    for key in ("k", "dtype", "overrides", "shapes", "dtypes"):
        if config.get(key, {}) != expected.get(key, {}):
            problems.append(f"{checkpoint.where}/{CONFIG_FILE}: {key} of {CONFIG_KEY} does not fit the tensors")


def _check_values(opened: QuantizedCheckpoint, reader: TileReader, report: VerifyReport, meter: ProgressMeter) -> None:
    """Codebooks must be finite and ascending; zero and saturated blocks are counted."""
    blocks = zero = saturated = 0
    for name, tensor in opened.tensors.items():
        try:
            constants = read_constants(reader, tensor)
        except KbitqError as error:
            report.problems.append(str(error))
            continue
        report.problems += [f"tensor {shown(name)}: {problem}" for problem in tensor.codec.problems(constants)]
        for part, stored in tensor.parts.items():
            if tensor.codec.scale_counts(part, torch.empty(0)) is None:
                continue
            for _, data in reader.chunks(stored):
                counts = tensor.codec.scale_counts(part, data) or (0, 0, 0)
                blocks, zero, saturated = (a + b for a, b in zip((blocks, zero, saturated), counts, strict=True))
                meter.add(data.numel(), name)
    report.totals.update(blocks=blocks, zero_blocks=zero, saturated_blocks=saturated)
    report.checks.append(f"values: {blocks:,} blocks, {zero:,} of zeros, {saturated:,} at the largest scale")


def _check_against(
    opened: QuantizedCheckpoint, reader: TileReader, source: Checkpoint, full: bool, sample: int, report: VerifyReport
) -> None:
    """Every tensor of the source must be there; the chosen ones are quantized again."""
    here = opened.tensors.keys() | opened.kept.keys()
    report.problems += [f"tensor {shown(n)} of {source.where} is missing" for n in source.tensors if n not in here]
    report.problems += [f"tensor {shown(n)} is not in {source.where}" for n in sorted(here) if n not in source.tensors]
    chosen = sorted(opened.tensors)
    if not full:
        count = min(sample, len(chosen))
        chosen = [chosen[i * len(chosen) // count] for i in range(count)]
    signal = noise = 0.0
    with TileReader(source) as plain:
        for name in chosen:
            if name in source.tensors:
                error_sums = _check_tensor(opened.tensors[name], reader, plain, report)
                signal, noise = signal + error_sums.signal, noise + error_sums.noise
        for name in sorted(opened.kept.keys() & source.tensors.keys()) if full else ():
            if not _same_values(reader, opened.kept[name], plain, source.tensors[name]):
                report.problems.append(f"tensor {shown(name)} was kept, but differs from the source")
    report.totals.update(compared=len(chosen), sqnr_db=sqnr_db(signal, noise))
    report.checks.append(f"source: {len(chosen)} of {len(opened.tensors)} quantized tensors made again and compared")


def _check_tensor(tensor: StoredTensor, reader: TileReader, plain: TileReader, report: VerifyReport) -> ErrorSums:
    """Measure one tensor against its original, and quantize that again where all that takes is known."""
    original = _original(tensor, plain, report)
    error_sums = ErrorSums()
    if original is None:
        return error_sums
    constants = read_constants(reader, tensor)
    if tensor.codec.problems(constants):  # said already, with the values
        return error_sums
    codec = TileCodec(plain)
    amax, levels = codec.scan(original).amax, tensor.codec.levels_of(constants)
    repeatable = tensor.meta.importance is None and tensor.meta.scale in ("absmax", "mse")
    differs = False
    for span in plain.spans(original):
        values = plain.read(original, span)
        stored = read_span(reader, tensor, span, constants)
        error_sums.add(span, tensor.codec.stats(values, stored))
        if repeatable and not differs:
            request = Request(tensor.codec.name, tensor.meta.k, levels, amax, tensor.meta.scale)
            again = codec.quantize_span(span, values, request).parts
            differs = not all(torch.equal(again[part], data) for part, data in stored.items())
    if differs:
        report.problems.append(f"tensor {tensor.name} is not what its source gives when it is quantized again")
    measured = {"sqnr_db": error_sums.sqnr_db, "max_abs_err": error_sums.max_abs_err}
    for key, spec in _STATISTICS:
        told = getattr(tensor.meta, key)
        if told is not None and measured[key] is not None and spec % told != spec % measured[key]:
            report.problems.append(f"tensor {tensor.name}: its {key} is {spec % measured[key]}, not {spec % told}")
    return error_sums


def _original(tensor: StoredTensor, plain: TileReader, report: VerifyReport) -> SourceTensor | None:
    try:
        return matching_source(plain.checkpoint, tensor)
    except KbitqError as error:
        report.problems.append(str(error))
        return None


def _same_values(reader: TileReader, kept: SourceTensor, plain: TileReader, original: SourceTensor) -> bool:
    if (kept.dtype, kept.shape) != (original.dtype, original.shape):
        return False
    if original.scaling is None:
        pairs: Iterator[Any] = zip(reader.chunks(kept), plain.chunks(original), strict=True)
        return all(torch.equal(a[1], b[1]) for a, b in pairs)
    return all(torch.equal(reader.read(kept, s), plain.read(original, s)) for s in plain.spans(original))
