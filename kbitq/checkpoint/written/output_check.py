"""Checking a folder that kbitq wrote in another tool's format: its ledger, its tensors, and the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kbitq.checkpoint.source.header import parse_json_object
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.side_files import REPORT_FILE
from kbitq.checkpoint.source.storage import read_all
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.codecs.base import OutputCodec, Request, coded_entries, output_codec, part_name
from kbitq.errors import CheckpointError
from kbitq.format import CONFIG_FILE, CONFIG_KEY, is_shape
from kbitq.text_safety import shown

_MOST_BYTES = 1 << 28  # of a ledger


@dataclass
class OutputCheck:
    """What is found of such a folder; ``rows`` are those of the ledger's quantized tensors, by name.

    Raises CheckpointError where the ledger has a row that no run writes.
    """

    checkpoint: Checkpoint
    rows: dict[str, dict[str, Any]]
    checks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

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
        wanted_method = output.quantization_config(row["k"], ())["quant_method"]
        if not isinstance(said, dict) or said.get("quant_method") != wanted_method:
            self.problems.append(f"{self.checkpoint.where}/{CONFIG_FILE}: {CONFIG_KEY} is not that of {wanted_method}")
        self.checks.append(f"structure: {len(self.rows)} tensors in the format {output.output}")

    def against(self, source: Checkpoint, count: int | None) -> int:
        """Make tensors again (``count`` of them, evenly spaced by name; None: all), and compare bytes."""
        names = sorted(self.rows)
        if count is not None:
            kept = min(count, len(names))
            names = [names[i * len(names) // kept] for i in range(kept)] if kept else []
        with TileReader(self.checkpoint) as written, TileReader(source) as plain:
            for name in names:
                original = source.tensors.get(name)
                row = self.rows[name]
                if original is None or [original.dtype, list(original.shape)] != [row["dtype"], list(row["shape"])]:
                    self.problems.append(f"{source.where} has no such tensor {shown(name)}: it is not the source")
                elif not self._same(name, row, original, written, plain):
                    self.problems.append(f"tensor {shown(name)} is not what quantizing the source again gives")
        self.checks.append(f"source: {len(names)} of {len(self.rows)} tensors made again and compared")
        return len(names)

    def _same(
        self, name: str, row: dict[str, Any], original: SourceTensor, written: TileReader, plain: TileReader
    ) -> bool:
        codec, k = _codec_of(row), row["k"]
        stored = {p.name: self.checkpoint.tensors.get(part_name(name, p)) for p in codec.parts(name, row["shape"], k)}
        request = Request(k, torch.zeros(1), row["scale"], shape=tuple(row["shape"]))
        for span in plain.spans(original, cut=codec.cut):
            places = codec.place(span, k)
            for part, made in codec.encode(plain.read(original, span), request).items():
                data, tensor = made.contiguous().reshape(-1).view(torch.uint8), stored[part]
                start = places.get(part, 0)
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
        if not _is_written(row):
            where = f"{checkpoint.where}/{REPORT_FILE}"
            raise CheckpointError(f"{where}: the row of {shown(name)} is not one of kbitq's")
    return OutputCheck(checkpoint, rows)


def _is_written(row: dict[str, Any]) -> bool:
    """Whether a run could have written this row."""
    shape: Any = row.get("shape")
    if not is_shape(shape) or len(shape) != 2 or 0 in shape or isinstance(row.get("k"), bool):
        return False
    return row.get("k") in _codec_of(row).ks and row.get("scale") in ("mse", "absmax")


def _codec_of(row: dict[str, Any]) -> OutputCodec:
    output = output_codec(row["codec"])
    assert output is not None
    return output
