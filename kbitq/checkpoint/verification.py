"""``verify``: whether a quantized checkpoint is whole and says the truth; against its source, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kbitq.checkpoint.comparison import Comparison
from kbitq.checkpoint.output.checksums import check_checksums
from kbitq.checkpoint.output.staging import leftovers, replaced_output
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor, open_checkpoint
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.recognise import is_kbitq, open_source
from kbitq.checkpoint.source.storage import Storage, local_path
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.output_check import OutputCheck, find_output
from kbitq.checkpoint.written.stored import QuantizedCheckpoint, StoredTensor, open_quantized, read_constants
from kbitq.choose.importance import Importance, load_importance
from kbitq.errors import CheckpointError, KbitqError
from kbitq.format import CONFIG_FILE, CONFIG_KEY, build_quantization_config, guard_name
from kbitq.text_safety import shown

DEFAULT_SAMPLE = 8  # tensors that are quantized again, unless all are


@dataclass
class VerifyReport:
    """What was checked and what is wrong.

    Attributes:
        checks: a sentence for each kind of check.
        problems: a sentence for each.
        totals: numbers of what was checked.
        not_made_again: the tensors that were only measured against the source, by name, with the reason.
    """

    checks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    not_made_again: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok, "problems": self.problems, "checks": self.checks, "totals": self.totals,
            "not_made_again": self.not_made_again,
        }  # fmt: skip


def verify(
    path: str | os.PathLike[str] | Storage,
    source: str | os.PathLike[str] | Storage | None = None,
    *,
    full: bool = False,
    sample: int = DEFAULT_SAMPLE,
    importance: str | os.PathLike[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Check a quantized file or folder: structure, values, checksums, and with ``source`` what it was made from.

    Args:
        path: a quantized file or folder.
        source: what it was quantized from; tensors are quantized again, and bytes and statistics compared.
        full: compare all tensors with the source; else ``sample`` of the quantized ones, evenly spaced by name.
        importance: the importance file that it was quantized with; without it, tensors that were made with one are
            measured against the source, but not made again.
        progress: called after each tile.

    Returns:
        A report; ``ok`` says whether no problem was found.

    Raises:
        CheckpointError: there is nothing to check (a missing path, no checkpoint, no source).
        ImportanceError: ``importance`` cannot be read, or is not the file that was used.
    """
    weights = load_importance(os.fspath(importance)) if importance is not None else None
    place = local_path(path)
    if place is not None and (waiting := replaced_output(place)) is not None:
        raise CheckpointError(
            f"{place} is missing: a run was cut while it replaced it, and the earlier output is {waiting}",
            hint="run the same command again, or rename that folder back",
        )
    checkpoint = open_checkpoint(path)
    if not is_kbitq(checkpoint):
        if (output := find_output(checkpoint)) is not None:
            return _verify_output(output, source, None if full else sample, weights, progress)
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
    for folder in leftovers(place) if place is not None else ():
        report.checks.append(f"left over: {folder} is of a run that was cut after its output was complete; remove it")
    with TileReader(checkpoint) as reader:
        meter = ProgressMeter(progress, _bytes_to_read(checkpoint, opened))
        _check_values(opened, reader, report, meter)
        check_checksums(checkpoint, report.checks, report.problems, meter)
        if source is not None:
            comparison = Comparison(opened, reader, open_source(source), weights)
            comparison.compare(full, sample)
            report.checks += comparison.checks
            report.problems += comparison.problems
            report.not_made_again = comparison.not_made_again
            report.totals.update(comparison.totals)
    return report


def _verify_output(
    found: OutputCheck,
    source: str | os.PathLike[str] | Storage | None,
    sample: int | None,
    importance: Importance | None,
    progress: Callable[[Progress], None] | None,
) -> VerifyReport:
    """A folder that kbitq wrote in another tool's format."""
    report = VerifyReport(found.checks, found.problems)
    found.structure()
    meter = ProgressMeter(progress, sum(f.size for f in found.checkpoint.fingerprints.values()))
    check_checksums(found.checkpoint, report.checks, report.problems, meter)
    if source is not None:
        report.totals["made_again"] = found.against(open_source(source), sample, importance)
        report.not_made_again = found.not_made_again
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
