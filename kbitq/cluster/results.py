"""Results of chunks as JSON that gives every bit back, and how those of one tensor come together.

What comes from a journal is checked here: a line with a good checksum may still be forged.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from kbitq.checkpoint.passes.journal_lines import scan_of
from kbitq.checkpoint.passes.measure import Measured
from kbitq.checkpoint.passes.run_state import ErrorSums, Scan
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan
from kbitq.checkpoint.source.spans import Span
from kbitq.cluster.chunks import Chunk
from kbitq.errors import CheckpointError


def measured_json(found: Measured | str) -> dict[str, Any]:
    """What measuring a tensor gave, or why it is kept."""
    if isinstance(found, str):
        return {"kept": found}
    return {f.name: _number_json(getattr(found, f.name)) for f in dataclasses.fields(found)}


def _number_json(value: Any) -> Any:
    if isinstance(value, dict):
        return [[codec, k, float(number).hex()] for (codec, k), number in value.items()]
    return float(value).hex()


def measured_of(result: Any) -> Measured | str:
    """What ``measured_json`` was given. Raises CheckpointError for what makes no sense."""
    try:
        if "kept" in result:
            return str(result["kept"])
        return Measured(**{str(name): _number_of(value) for name, value in result.items()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _forged("measure") from error


def _number_of(value: Any) -> Any:
    if isinstance(value, list):
        return {(str(codec), int(k)): float.fromhex(number) for codec, k, number in value}
    return float.fromhex(value)


def merged_scan(results: Iterable[Any]) -> Scan:
    """The scan of a tensor from those of its chunks, in order."""
    found = Scan()
    try:
        for result in results:
            here = scan_of(result)
            if not math.isfinite(here.amax) or here.amax < 0 or here.nonfinite < 0:
                raise ValueError(result)
            found.add(here)
    except (TypeError, ValueError, OverflowError) as error:
        raise _forged("scan") from error
    return found


def levels_json(levels: torch.Tensor, gain_db: float) -> dict[str, Any]:
    """A fitted codebook, and what it gained."""
    return {"levels": [float(x).hex() for x in levels.tolist()], "gain": float(gain_db).hex()}


def levels_of(result: Any, k: int) -> tuple[torch.Tensor, float]:
    """Levels float32 ``[2^k]``, ascending, and the gain in dB. Raises CheckpointError for what are none."""
    try:
        values = torch.tensor([float.fromhex(text) for text in result["levels"]], dtype=torch.float32)
        gain = float.fromhex(result["gain"])
    except (KeyError, TypeError, ValueError) as error:
        raise _forged("fit") from error
    if values.shape != (1 << k,) or not bool(torch.isfinite(values).all()) or not bool((values.diff() > 0).all()):
        raise _forged("fit")
    return values, gain


class RowSums:
    """The errors of some rows of a tensor, row by row, since sums must be added in the order of all its rows."""

    def __init__(self) -> None:
        self._tables: list[np.ndarray] = []
        self._row = ErrorSums()  # of a row longer than a tile
        self._largest = 0.0

    def add(self, made: QuantizedSpan) -> None:
        """Add the errors of a span that follows the one before."""
        table = made.errors.cpu().numpy()
        self._largest = max(self._largest, float(table[:, 2].max()))
        if made.span.whole_rows:
            self._tables.append(np.ascontiguousarray(table[:, :2]))
            return
        self._row.add(made.span, made.errors)
        if made.span.ends_row:
            self._tables.append(np.array([[self._row.signal, self._row.noise]]))
            self._row = ErrorSums()

    def to_json(self) -> dict[str, Any]:
        """Rows as float64 ``[rows, 2]`` (signal, noise), little endian."""
        table = np.concatenate(self._tables).astype("<f8")
        return {"rows": base64.b64encode(table.tobytes()).decode(), "largest": self._largest.hex()}


def merged_sums(chunks: Iterable[tuple[Chunk, Any]]) -> ErrorSums:
    """The error sums of a tensor from the results of all its chunks, in order: as one run has them, to the bit."""
    found = ErrorSums()
    for chunk, result in chunks:
        rows = chunk.stop - chunk.start
        try:
            table = np.frombuffer(base64.b64decode(result["rows"], validate=True), "<f8").reshape(rows, 2)
            largest = float.fromhex(result["largest"])
        except (KeyError, TypeError, ValueError) as error:
            raise _forged("write") from error
        whole = np.column_stack([table, np.full(rows, largest)])
        found.add(Span(0, 0, rows, 1, True, True, 1), torch.from_numpy(whole))
    return found


def edges_json(edges: Iterable[tuple[int, bytes]]) -> list[list[Any]]:
    """Bytes on shared pages, with their offsets in the file."""
    return [[offset, base64.b64encode(data).decode()] for offset, data in edges]


def edges_of(result: Any, lowest: int, highest: int) -> Iterator[tuple[int, bytes]]:
    """Offsets and bytes, all within ``lowest`` to ``highest`` of the file. Raises CheckpointError for others."""
    try:
        found = [(int(offset), base64.b64decode(text, validate=True)) for offset, text in result["edges"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _forged("write") from error
    for offset, data in found:
        if offset < lowest or offset + len(data) > highest:
            raise _forged("write")
        yield offset, data


def sealed_json(sha256: str, sums: Mapping[str, ErrorSums]) -> dict[str, Any]:
    """A file that is complete: its checksum, and the error sums of its tensors."""
    return {"sha256": sha256, "sums": {name: [x.hex() for x in found.values()] for name, found in sums.items()}}


def sealed_of(result: Any) -> tuple[str, dict[str, ErrorSums]]:
    """What ``sealed_json`` was given."""
    try:
        sums = {str(n): ErrorSums.from_values([float.fromhex(x) for x in v]) for n, v in result["sums"].items()}
        return str(result["sha256"]), sums
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _forged("seal") from error


def _forged(phase: str) -> CheckpointError:
    return CheckpointError(f"a journal of the plan has a result of {phase} that makes no sense", remedy="plan-again")
