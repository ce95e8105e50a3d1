"""A checkpoint as the page shows it: its rows with what they are held against, and what is known of how it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbitq.card import command_of, source_in
from kbitq.checkpoint.inspection import InspectReport, inspect
from kbitq.checkpoint.plan.totals import codec_of
from kbitq.checkpoint.source.header import parse_json_object
from kbitq.checkpoint.source.progress import Progress
from kbitq.checkpoint.source.side_files import CARD_FILE, EVALUATION_FILE, REPORT_FILE
from kbitq.checkpoint.source.storage import Storage, read_all
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.stored import QuantizedCheckpoint, StoredTensor, open_quantized, read_constants
from kbitq.choose.tensor_names import layer_of, role_of, short_roles
from kbitq.eval.record import parse_evaluations, parse_tasks
from kbitq.report.expected import expected_db, is_named

Row = dict[str, Any]
Watch = Callable[[Progress], None] | None
_MAX_LEDGER_BYTES, _MAX_PAGE_BYTES = 1 << 28, 1 << 20


@dataclass
class Side:
    """One of the checkpoints of a page.

    Attributes:
        key: ``A`` or ``B``.
        name: of the file or folder.
        rows: of its quantized tensors, as ``inspect`` gives them, with ``role``, ``layer``, ``expected_db`` (what
            normal weights have) and ``off_db`` (SQNR less that).
        kept: rows of the others.
        ledger: ``quantization_report.json``; empty for a single file.
        evaluations: results of ``kbitq eval --save`` on texts.
        tasks: scores of ``kbitq eval --tasks``.
        source: what it was made from, where that is known.
    """

    key: str
    name: str
    report: InspectReport
    opened: QuantizedCheckpoint
    rows: list[Row]
    kept: list[Row]
    ledger: Mapping[str, Any] = field(default_factory=dict)
    evaluations: list[Row] = field(default_factory=list)
    tasks: list[Row] = field(default_factory=list)
    source: str | None = None

    @property
    def command(self) -> str | None:
        """The command that makes it again; None where its options are not known."""
        return command_of(self.ledger, self.source) if self.ledger.get("options") else None


def read_side(
    key: str, path: str | Path | Storage, against: str | Path | Storage | None = None, progress: Watch = None
) -> Side:
    """Inspect a quantized checkpoint and read what lies beside its weights. Raises as ``inspect`` does."""
    opened = open_quantized(path)  # raises where it is not quantized
    report = inspect(path, against=against, progress=progress)
    rows: list[Row] = [dict(row) for row in report.tensors if row["verdict"] == "quantized"]
    kept: list[Row] = [dict(row) for row in report.tensors if row["verdict"] != "quantized"]
    side = Side(key, opened.checkpoint.storage.name, report, opened, _placed(rows, opened), kept)
    _read_files(side, opened.checkpoint.storage)
    return side


def _placed(rows: list[Row], opened: QuantizedCheckpoint) -> list[Row]:
    roles = short_roles(list(dict.fromkeys(role_of(row["name"]) for row in rows)))
    placed = []
    with TileReader(opened.checkpoint) as reader:
        for row in rows:
            found = _expectation(row, _levels(reader, opened.tensors[row["name"]]))
            placed.append({**row, "role": roles[role_of(row["name"])], "layer": layer_of(row["name"]), **found})
    return placed


def _levels(reader: TileReader, tensor: StoredTensor) -> tuple[float, ...] | None:
    """The levels of a tensor that are not known by their name."""
    if is_named(tensor.meta.codebook):
        return None
    levels = tensor.codec.levels_of(read_constants(reader, tensor))
    return None if levels is None else tuple(levels.tolist())


def _expectation(row: Row, levels: tuple[float, ...] | None) -> Row:
    expected = expected_db(codec_of(row), row["k"], row["codebook"], row["scale"], levels)
    known = expected is not None and row["sqnr_db"] is not None
    return {"expected_db": expected, "off_db": row["sqnr_db"] - expected if known else None}


def _read_files(side: Side, storage: Storage) -> None:
    """What a folder says of itself beside its weights."""
    names = set() if storage.single else set(storage.names())
    if REPORT_FILE in names:
        side.ledger = parse_json_object(read_all(storage, REPORT_FILE, _MAX_LEDGER_BYTES), REPORT_FILE)
    if EVALUATION_FILE in names:
        results = read_all(storage, EVALUATION_FILE, _MAX_PAGE_BYTES)
        side.evaluations = parse_evaluations(results, EVALUATION_FILE)
        side.tasks = parse_tasks(results, EVALUATION_FILE)
    source = side.ledger.get("source")
    if isinstance(source, str):
        side.source = source
    elif CARD_FILE in names:
        side.source = source_in(read_all(storage, CARD_FILE, 2 * _MAX_PAGE_BYTES).decode("utf-8", "replace"))
