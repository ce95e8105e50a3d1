"""``inspect``: what a quantized checkpoint holds and cost; what each K would give an ordinary one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kbitq import ops
from kbitq.checkpoint.passes.run_state import ErrorSums
from kbitq.checkpoint.passes.tile_codec import Request, TileCodec
from kbitq.checkpoint.plan.totals import LedgerRow, kept_row, quantized_row, totals
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor, open_checkpoint
from kbitq.checkpoint.source.progress import Progress, ProgressMeter
from kbitq.checkpoint.source.recognise import is_kbitq, open_source, prepare_source
from kbitq.checkpoint.source.sample import sampled
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.storage import LocalFileStorage, LocalFolderStorage, Storage
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.compare import matching_source, measure_tensor
from kbitq.checkpoint.written.output_check import OutputCheck, find_output
from kbitq.checkpoint.written.stored import QuantizedCheckpoint, open_quantized, read_constants
from kbitq.choose.selection import Selection, check_k
from kbitq.codecs.base import coded_nbytes, constant_nbytes, get_codec
from kbitq.errors import CheckpointError
from kbitq.format import DEFAULT_CODEC, element_count, stored_dtype
from kbitq.quantized import sqnr_db


@dataclass
class InspectReport:
    """What was found.

    Attributes:
        totals: sums over the tensors, and the worst of them.
        tensors: a row each; of an unquantized checkpoint with ``would``: K -> ``{"sqnr_db", "bytes"}``, or None.
        quantized: whether kbitq wrote the checkpoint.
        notes: sentences about what was left out.
    """

    totals: dict[str, Any]
    tensors: list[LedgerRow]
    quantized: bool
    notes: list[str] = field(default_factory=list)


def inspect(
    path: str | Path | Storage,
    against: str | Path | Storage | None = None,
    ks: Sequence[int] = (2, 3, 4, 5),
    sample: bool = False,
    progress: Callable[[Progress], None] | None = None,
    codec: str = DEFAULT_CODEC,
) -> InspectReport:
    """Look into a checkpoint.

    Args:
        path: a file or folder. Quantized: its tensors and what they cost. Else: what each K would give, with the
            default selection, codebook and scale rule.
        against: the source of a quantized checkpoint; errors are then measured again, not read from the metadata.
        ks: the K to try on an unquantized checkpoint.
        sample: try them on evenly spaced blocks of each tensor only.
        progress: called after each tile.
        codec: the codec to try them with, as in ``kbitq.quantize``; ``trellis/128`` has scales for 128 columns.

    Raises:
        CheckpointError: a path cannot be used, or ``against`` is not the source; FormatError.
    """
    checkpoint = open_checkpoint(path)
    if is_kbitq(checkpoint):
        return _inspect_quantized(open_quantized(checkpoint), against, progress)
    if (output := find_output(checkpoint)) is not None:
        return _inspect_output(output, against)
    if against is not None:
        raise CheckpointError(
            f"{checkpoint.where} is not quantized, so there is nothing to compare",
            hint="leave against away",
            remedy="against",
        )
    prepare_source(checkpoint)
    return _inspect_source(checkpoint, _Trial(codec, tuple(ks), sample), progress)


def _inspect_quantized(
    opened: QuantizedCheckpoint, against: str | Path | Storage | None, progress: Callable[[Progress], None] | None
) -> InspectReport:
    overall = None
    if against is not None:
        overall = _measure(opened, open_source(against), progress)  # this reads the codebooks too
    elif isinstance(opened.checkpoint.storage, LocalFileStorage | LocalFolderStorage):
        _check_constants(opened)  # not over a network, where each would be a request of its own
    rows = [quantized_row(name, tensor.meta) for name, tensor in opened.tensors.items()]
    rows += [kept_row(n, opened.reasons.get(n, ""), t.shape, t.dtype, t.nbytes) for n, t in opened.kept.items()]
    before = sum(t.nbytes for t in opened.kept.values())
    for tensor in opened.tensors.values():
        before += element_count(tensor.meta.shape) * stored_dtype(tensor.meta.dtype).bits // 8
    return InspectReport(totals(rows, before, overall), rows, True)


def _inspect_output(found: OutputCheck, against: str | Path | Storage | None) -> InspectReport:
    """A folder that kbitq wrote in another tool's format, by its ledger, or measured again."""
    overall = None
    if against is not None:
        sums = found.measure(open_source(against), found.rows)
        for name, mine in sums.items():
            found.metas[name].sqnr_db, found.metas[name].max_abs_err = mine.sqnr_db, mine.max_abs_err
        overall = sqnr_db(sum(s.signal for s in sums.values()), sum(s.noise for s in sums.values()))
    rows = [quantized_row(name, meta) for name, meta in found.metas.items()]
    rows += [kept_row(name, "", t.shape, t.dtype, t.nbytes) for name, t in found.kept.items()]
    before = sum(t.nbytes for t in found.kept.values())
    for meta in found.metas.values():
        before += element_count(meta.shape) * stored_dtype(meta.dtype).bits // 8
    return InspectReport(totals(rows, before, overall), rows, True)


def _check_constants(opened: QuantizedCheckpoint) -> None:
    """Raise FormatError for a codebook that is not finite, as every reader must."""
    with TileReader(opened.checkpoint) as reader:
        for tensor in opened.tensors.values():
            read_constants(reader, tensor)


def _measure(
    opened: QuantizedCheckpoint, source: Checkpoint, progress: Callable[[Progress], None] | None
) -> float | None:
    """Measure every quantized tensor against its source, into the metadata; returns the overall SQNR in dB."""
    pairs = [(t, matching_source(source, t)) for t in opened.tensors.values()]
    meter = ProgressMeter(progress, sum(original.nbytes for _, original in pairs))
    signal = noise = 0.0
    with TileReader(opened.checkpoint) as stored, TileReader(source) as plain:
        for tensor, original in pairs:
            found = measure_tensor(stored, tensor, plain, original)
            tensor.meta.sqnr_db, tensor.meta.max_abs_err = found.sqnr_db, found.max_abs_err
            signal, noise = signal + found.signal, noise + found.noise
            meter.add(original.nbytes, tensor.name)
    return sqnr_db(signal, noise)


@dataclass(frozen=True)
class _Trial:
    """What is tried on the tensors of an ordinary checkpoint."""

    codec: str
    ks: tuple[int, ...]
    sample: bool

    @property
    def cut(self) -> int:
        return get_codec(self.codec).cut

    def requests(self, amax: float) -> dict[int, Request]:
        """How a tensor of this largest magnitude is quantized at each K."""
        levels = {k: get_codec(self.codec).levels("optimal", k)[0] for k in self.ks}
        on_cpu = {k: None if found is None else torch.from_numpy(found.copy()) for k, found in levels.items()}
        return {k: Request(self.codec, k, on_cpu[k], amax, "mse") for k in self.ks}


def _inspect_source(
    checkpoint: Checkpoint, trial: _Trial, progress: Callable[[Progress], None] | None
) -> InspectReport:
    least = min(trial.ks, default=get_codec(trial.codec).ks[0])
    for k in trial.ks:
        check_k(k, (trial.codec,))
    chosen = {}
    for tensor in checkpoint.tensors.values():
        # The smallest K quantizes most: what would not shrink at a larger one is judged by its size there.
        selection = Selection(least, codec=trial.codec)
        chosen[tensor.name] = selection.verdict(tensor.name, tensor.shape, tensor.dtype)
    meter = ProgressMeter(progress, sum(t.nbytes for t in checkpoint.tensors.values() if chosen[t.name].quantize))
    error_sums: dict[int, list[ErrorSums]] = {k: [] for k in trial.ks}
    rows = []
    with TileReader(checkpoint) as reader:
        for tensor in checkpoint.tensors.values():
            row = kept_row(tensor.name, chosen[tensor.name].reason, tensor.shape, tensor.dtype, tensor.file_nbytes)
            row["would"] = None
            if chosen[tensor.name].quantize:
                row["verdict"] = "quantized"
                row["would"] = _try(TileCodec(reader), tensor, trial, error_sums)
                if row["would"] is None:
                    row["verdict"], row["reason"] = "kept", "values are not finite"
                meter.add(tensor.nbytes, tensor.name)
            rows.append(row)
    return InspectReport(_source_totals(checkpoint, rows, trial, error_sums), rows, False, list(checkpoint.notes))


def _try(
    codec: TileCodec, tensor: SourceTensor, trial: _Trial, error_sums: dict[int, list[ErrorSums]]
) -> dict[int, dict[str, Any]] | None:
    """What each K gives for one tensor; the error sums of each K are added to ``error_sums``."""
    tiles = list(sampled(codec.reader, tensor, trial.cut)) if trial.sample else None
    amax, finite = _largest(codec, tensor, tiles)
    if not finite:
        return None
    would: dict[int, dict[str, Any]] = {}
    mine = {k: ErrorSums() for k in trial.ks}
    requests = trial.requests(amax)
    for span, w in tiles if tiles is not None else _tiles(codec.reader, tensor, trial.cut):
        for k, request in requests.items():
            mine[k].add(span, codec.quantize_span(span, w, request).errors)
    for k in trial.ks:
        what = trial.codec, tensor.name, tensor.shape, k
        size = coded_nbytes(*what) + constant_nbytes(*what)
        would[k] = {"sqnr_db": mine[k].sqnr_db, "bytes": size}
        error_sums[k].append(_scaled_up(mine[k], tensor, tiles))
    return would


def _tiles(reader: TileReader, tensor: SourceTensor, cut: int) -> Iterator[tuple[Span, torch.Tensor]]:
    for span in reader.spans(tensor, cut=cut):
        yield span, reader.read(tensor, span)


def _largest(
    codec: TileCodec, tensor: SourceTensor, tiles: list[tuple[Span, torch.Tensor]] | None
) -> tuple[float, bool]:
    """The largest magnitude of a tensor (or of its sample), and whether all of it is finite."""
    if tiles is None:
        scan = codec.scan(tensor)
        return scan.amax, not scan.nonfinite
    amax, status = ops.scan(tiles[0][1])
    return float(amax), not int(status[0])


def _scaled_up(found: ErrorSums, tensor: SourceTensor, tiles: list[tuple[Span, torch.Tensor]] | None) -> ErrorSums:
    """A sample's error sums count for the whole tensor in the totals."""
    factor = element_count(tensor.shape) / tiles[0][0].numel if tiles else 1.0
    return ErrorSums(found.signal * factor, found.noise * factor, found.max_abs_err)


def _source_totals(
    checkpoint: Checkpoint, rows: list[LedgerRow], trial: _Trial, error_sums: dict[int, list[ErrorSums]]
) -> dict[str, Any]:
    chosen = [(r, tried) for r in rows if (tried := r["would"])]
    weights = sum(element_count(r["shape"]) for r, _ in chosen)
    quantized = {r["name"] for r, _ in chosen}
    untouched = sum(t.plain_nbytes for t in checkpoint.tensors.values() if t.name not in quantized)
    would = {}
    for k in trial.ks:
        stored = sum(coded_nbytes(trial.codec, r["name"], r["shape"], k) for r, _ in chosen)
        would[k] = {
            "bytes": untouched + sum(tried[k]["bytes"] for _, tried in chosen),
            "bits_per_weight": 8 * stored / weights if weights else 0.0,
            "sqnr_db": sqnr_db(sum(s.signal for s in error_sums[k]), sum(s.noise for s in error_sums[k])),
        }
    parameters = sum(element_count(r["shape"]) for r in rows)
    return {
        "tensors": len(rows), "quantized": len(chosen), "kept": len(rows) - len(chosen), "parameters": parameters,
        "quantized_parameters": weights, "coverage": weights / parameters if parameters else 0.0,
        "bytes": checkpoint.nbytes, "would": would,
        **({"codec": trial.codec} if trial.codec != DEFAULT_CODEC else {}),
    }  # fmt: skip
