"""Checking a folder that kbitq wrote in another tool's format: its ledger, its tensors, and the source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from kbitq.checkpoint.passes.levels import ColumnWeights
from kbitq.checkpoint.passes.run_state import ErrorSums
from kbitq.checkpoint.passes.shard_writer import placed_parts
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan
from kbitq.checkpoint.source.header import parse_json_object
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.recognise import open_source
from kbitq.checkpoint.source.side_files import REPORT_FILE
from kbitq.checkpoint.source.storage import read_all
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.repeatable import needs_more_than_source
from kbitq.choose.importance import Importance
from kbitq.codecs.base import OutputCodec, Request, coded_entries, output_codec, part_name
from kbitq.codecs.outputs import WHOLE_ROW
from kbitq.errors import CheckpointError, KbitqError
from kbitq.format import CONFIG_FILE, CONFIG_KEY, TensorMeta, is_shape
from kbitq.text_safety import shown

_MOST_BYTES = 1 << 28  # of a ledger
_SAME_DB = 0.01


@dataclass
class OutputCheck:
    """What is found of such a folder; ``rows`` are those of the ledger's quantized tensors, by name, and
    ``not_made_again`` the tensors that were only measured, with the reason.

    Raises CheckpointError where the ledger has a row that no run writes.
    """

    checkpoint: Checkpoint
    rows: dict[str, dict[str, Any]]
    checks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    not_made_again: dict[str, str] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """As ``--format`` spells it."""
        return _codec_of(next(iter(self.rows.values()))).output

    def structure(self) -> None:
        """The parts of every tensor, and what config.json says."""
        for name, row in self.rows.items():
            for entry in coded_entries(row["codec"], name, row["shape"], row["k"]):
                found = self.checkpoint.tensors.get(entry.name)
                if found is None or (found.dtype, tuple(found.shape)) != (entry.dtype, tuple(entry.shape)):
                    have = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
                    wanted = f"{entry.dtype} {list(entry.shape)}"
                    self.problems.append(f"tensor {shown(entry.name)} is {have}, not {wanted}")
        output, row = _codec_of(next(iter(self.rows.values()))), next(iter(self.rows.values()))
        said = (self.checkpoint.config or {}).get(CONFIG_KEY)
        wanted_method = output.quantization_config({"": row["k"]}, ())["quant_method"]
        if not isinstance(said, dict) or said.get("quant_method") != wanted_method:
            self.problems.append(f"{self.checkpoint.where}/{CONFIG_FILE}: {CONFIG_KEY} is not that of {wanted_method}")
        self.checks.append(f"structure: {len(self.rows)} tensors in the format {output.output}")

    def against(self, source: Checkpoint, count: int | None, importance: Importance | None = None) -> int:
        """Make tensors again (``count`` of them, evenly spaced by name; None: all), and compare bytes.

        Those whose bytes the source does not determine are measured against it. Returns how many were made again.
        """
        names = sorted(self.rows)
        if count is not None:
            kept = min(count, len(names))
            names = [names[i * len(names) // kept] for i in range(kept)] if kept else []
        columns = ColumnWeights(importance)
        with TileReader(self.checkpoint) as written, TileReader(source) as plain:
            for name in names:
                original = source.tensors.get(name)
                row = self.rows[name]
                if original is None or [original.dtype, list(original.shape)] != [row["dtype"], list(row["shape"])]:
                    self.problems.append(f"{source.where} has no such tensor {shown(name)}: it is not the source")
                elif (why := needs_more_than_source(row, importance)) is not None:
                    self.not_made_again[name] = why
                elif not self._same(name, row, original, written, plain, columns):
                    self.problems.append(f"tensor {shown(name)} is not what quantizing the source again gives")
            if self.not_made_again:
                self._measure_all(plain)
        again = len(names) - len(self.not_made_again)
        self.checks.append(f"source: {again} of {len(self.rows)} tensors made again and compared")
        for reason, number in sorted(Counter(self.not_made_again.values()).items()):
            self.checks.append(f"not made again: {number} tensors, {reason}; their errors are measured again")
        return again

    def _measure_all(self, plain: TileReader) -> None:
        """The errors of the tensors that are not made again, against what their rows say."""
        try:
            measured = self.measure(plain.checkpoint, self.not_made_again)
        except KbitqError as error:
            self.problems.append(str(error))
            return
        for name, sums in measured.items():
            told, found = self.metas[name].sqnr_db, sums.sqnr_db
            same = told == found if told is None or found is None else abs(told - found) <= _SAME_DB
            if not same:
                self.problems.append(f"tensor {shown(name)}: its sqnr_db is said to be {told}, but is {found}")

    def measure(self, source: Checkpoint, names: Iterable[str]) -> dict[str, ErrorSums]:
        """The errors of tensors, as they are decoded. Raises CheckpointError where one cannot be or has no original."""
        decoded, found = open_source(self.checkpoint.storage), {}
        with TileReader(decoded) as read, TileReader(source) as plain:
            for name in names:
                back, original = decoded.tensors.get(name), source.tensors.get(name)
                if back is None or original is None or back.shape != original.shape:
                    raise CheckpointError(f"{source.where} has no such tensor {shown(name)}: it is not the source")
                found[name] = ErrorSums()
                for span in plain.spans(original, cut=WHOLE_ROW):
                    w = plain.read(original, span).double()
                    error = w - read.read(back, span).double()
                    table = w.square().sum(1), error.square().sum(1), error.abs().amax(1)
                    found[name].add(replace(span, whole_rows=True), torch.stack(table, 1))
        return found

    @cached_property
    def metas(self) -> dict[str, TensorMeta]:
        """What the ledger says of each quantized tensor."""
        return {name: _meta(row) for name, row in self.rows.items()}

    @property
    def kept(self) -> dict[str, SourceTensor]:
        """The tensors that are stored as they were."""
        parts = {
            entry.name
            for name, meta in self.metas.items()
            for entry in coded_entries(meta.codec, name, meta.shape, meta.k)
        }
        return {name: tensor for name, tensor in self.checkpoint.tensors.items() if name not in parts}

    def _same(
        self, name: str, row: dict[str, Any], original: SourceTensor, written: TileReader, plain: TileReader,
        columns: ColumnWeights,
    ) -> bool:  # fmt: skip
        codec, k = _codec_of(row), row["k"]
        stored = {p.name: self.checkpoint.tensors.get(part_name(name, p)) for p in codec.parts(name, row["shape"], k)}
        request = Request(k, torch.zeros(1), row["scale"], shape=tuple(row["shape"]))
        weighted = "importance" in row
        shapes = {part: tensor.shape for part, tensor in stored.items() if tensor is not None}
        for span in plain.spans(original, cut=codec.cut, together=codec.rows_together(row["shape"][1])):
            values = plain.read(original, span)
            weights = columns.of(name, original.shape, span) if weighted else None
            parts = codec.encode(values, replace(request, importance=weights))
            made = QuantizedSpan(span, codec, k, parts, torch.empty(0))
            if not shapes.keys() >= made.parts.keys():
                return False
            for part, start, piece in placed_parts(made, shapes):
                data, tensor = piece.contiguous().reshape(-1).view(torch.uint8), stored[part]
                if tensor is None or start + data.numel() > tensor.nbytes:
                    return False
                if not torch.equal(written.read_bytes(tensor, start, data.numel(), "written"), data):
                    return False
        return True


def find_output(checkpoint: Checkpoint) -> OutputCheck | None:
    """The check for a folder that kbitq wrote in another tool's format; None for any other checkpoint."""
    if checkpoint.storage.single or REPORT_FILE not in checkpoint.storage.names():
        return None
    ledger = parse_json_object(read_all(checkpoint.storage, REPORT_FILE, _MOST_BYTES), REPORT_FILE)
    listed = ledger.get("tensors")
    rows: dict[str, dict[str, Any]] = {}
    for row in listed if isinstance(listed, list) else ():
        if isinstance(row, dict) and row.get("verdict") == "quantized":
            rows[str(row.get("name"))] = row
    if not rows or not all(isinstance(r.get("codec"), str) and output_codec(r["codec"]) for r in rows.values()):
        return None
    for name, row in rows.items():
        if not _is_written(name, row):
            where = f"{checkpoint.where}/{REPORT_FILE}"
            raise CheckpointError(f"{where}: the row of {shown(name)} is not one of kbitq's")
    return OutputCheck(checkpoint, rows)


def _meta(row: dict[str, Any]) -> TensorMeta:
    """A row that ``_is_written`` approves of; what else is odd in it is left out."""

    def number(key: str) -> float | None:
        value = row.get(key)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def text(key: str) -> str | None:
        return value if isinstance(value := row.get(key), str) else None

    return TensorMeta(
        row["k"], tuple(row["shape"]), row["dtype"], row["scale"], "none", number("sqnr_db"), number("max_abs_err"),
        text("importance"), row["codec"], text("calibrated"),
    )  # fmt: skip


def _is_written(name: str, row: dict[str, Any]) -> bool:
    """Whether a run could have written this row."""
    shape: Any = row.get("shape")
    if not is_shape(shape) or len(shape) != 2 or 0 in shape or isinstance(row.get("k"), bool):
        return False
    if row.get("dtype") not in ("BF16", "F16", "F32", "F64") or _codec_of(row).refusal(name, shape) is not None:
        return False
    return row.get("k") in _codec_of(row).ks and row.get("scale") in ("mse", "absmax")


def _codec_of(row: dict[str, Any]) -> OutputCodec:
    output = output_codec(row["codec"])
    assert output is not None
    return output
