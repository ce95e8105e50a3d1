"""Reading a folder of statistics: for every input that weights are multiplied by, H = the sum over tokens of x xᵀ.

The folder holds ``calibration.json`` and the tensors of ``hessians.safetensors`` (or shards and an index). H is stored
as two tensors, under the name of the first weight that it belongs to: ``NAME.triangle`` float32 ``[n]`` (``[E, n]`` for
fused experts), its lower triangle row by row, block after block where only blocks on the diagonal are kept, and
``NAME.diagonal`` float32 ``[in]`` (``[E, in]``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from kbitq.calibration.triangle import blocks, lower, symmetric, triangle_elements
from kbitq.checkpoint.source.header import parse_json_object
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor, open_checkpoint
from kbitq.checkpoint.source.storage import read_all
from kbitq.errors import CalibrationError, CheckpointError
from kbitq.format import is_fused_experts, matrix_shape
from kbitq.text_safety import shown

SUMMARY_FILE, STEM = "calibration.json", "hessians"
TRIANGLE, DIAGONAL = ".triangle", ".diagonal"
FORMAT, VERSION = "kbitq-calibration", 1
TRANSPOSED_VERSION = 2  # of a folder with an H of transposed weights, which readers of version 1 do not know
_MOST_BYTES = 100_000_000  # of calibration.json


@dataclass(frozen=True)
class Entry:
    """One H, or the H of each expert of a stack, and the weights that it belongs to.

    Attributes:
        columns: of those weights, ``in``; where they are transposed, their rows.
        block: columns of a block where only the blocks on the diagonal are kept, else None.
        tokens: that the sums are over; one number for each expert.
        sha256: of the values of the triangle.
        tensors: name of a weight in the model's files -> its expert, or None where it has all of them.
        transposed: whether those weights are stored ``[in, out]``.
    """

    columns: int
    block: int | None
    tokens: tuple[int, ...]
    sha256: str
    tensors: Mapping[str, int | None]
    transposed: bool = False

    @property
    def name(self) -> str:
        """Under which the tensors are stored."""
        return next(iter(self.tensors))

    def as_json(self) -> dict[str, Any]:
        """What ``calibration.json`` says of it."""
        return {
            "columns": self.columns, "block": self.block, "tokens": list(self.tokens), "sha256": self.sha256,
            "tensors": dict(self.tensors), **({"transposed": True} if self.transposed else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """What ``calibration.json`` says: ``model`` and ``text`` are about what was run, ``versions`` about what ran it."""

    model: Mapping[str, Any]
    text: Mapping[str, Any]
    versions: Mapping[str, Any]
    entries: tuple[Entry, ...]

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) over everything but the versions."""
        table = {"model": dict(self.model), "text": dict(self.text), "hessians": [e.as_json() for e in self.entries]}
        return hashlib.sha256(json.dumps(table, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The contents of the file."""
        version = TRANSPOSED_VERSION if any(e.transposed for e in self.entries) else VERSION
        return {
            "format": FORMAT, "version": version, "model": dict(self.model), "text": dict(self.text),
            "versions": dict(self.versions), "hessians": [e.as_json() for e in self.entries],
        }  # fmt: skip


class Hessian:
    """H of one weight, read from the folder when it is asked for.

    Attributes:
        columns: of the weight (``in``); where it is transposed, its rows.
        transposed: whether the weight is stored ``[in, out]``.
        experts: 1 for a matrix; E for fused experts ``[E, a, b]``.
        block: columns of a block where only the blocks on the diagonal are kept, else None.
        tensors: names of all weights that share it.
    """

    def __init__(self, files: Checkpoint, entry: Entry, expert: int | None) -> None:
        self._files, self._entry = files, entry
        self._first = expert or 0
        self.experts = len(entry.tokens) if expert is None else 1
        self.columns, self.block, self.transposed = entry.columns, entry.block, entry.transposed
        self.tensors = tuple(entry.tensors)

    @property
    def tokens(self) -> int:
        """Tokens that the sums are over; of all experts together."""
        return sum(self.tokens_of(expert) for expert in range(self.experts))

    @property
    def parts(self) -> list[range]:
        """The columns of each block on the diagonal; one where H is kept whole."""
        return blocks(self.columns, self.block)

    def tokens_of(self, expert: int = 0) -> int:
        """Tokens that one expert's sums are over."""
        return self._entry.tokens[self._row(expert)]

    def matrix(self, expert: int = 0) -> Tensor:
        """H, float32 ``[in, in]`` on the CPU, symmetric; zeros between blocks where only blocks are kept.

        Raises:
            CalibrationError: the file cannot be read any more.
        """
        return self._made(symmetric, expert, "cpu")

    def usable(self, expert: int = 0) -> Tensor:
        """H for error feedback: ``matrix``, or its diagonal alone where fewer tokens were seen than there are columns
        (an expert that was rarely chosen)."""
        h = self.matrix(expert)
        return h if expert not in self.scarce() else torch.diag(h.diagonal())

    def usable_triangle(self, expert: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """The lower triangle of ``usable``, zeros above it, on a device: what a factor is made of. Raises as ``matrix``
        does."""
        if expert in self.scarce():
            return torch.diag(self.diagonal(expert).to(device))
        return self._made(lower, expert, device)

    def _made(self, of_triangle: Callable[[Tensor, int], Tensor], expert: int, device: torch.device | str) -> Tensor:
        """H from its stored blocks, each made a square on the device."""
        flat = self._read(TRIANGLE, expert, pinned=torch.device(device).type == "cuda").to(device, non_blocking=True)
        if len(self.parts) == 1:
            return of_triangle(flat, self.columns)
        made, at = torch.zeros(self.columns, self.columns, device=device), 0
        for part in self.parts:
            size = triangle_elements(len(part))
            made[part.start : part.stop, part.start : part.stop] = of_triangle(flat[at : at + size], len(part))
            at += size
        return made

    def scarce(self) -> list[int]:
        """The experts that saw fewer tokens than there are columns."""
        return [expert for expert in range(self.experts) if self.tokens_of(expert) < self.columns]

    def diagonal(self, expert: int = 0) -> Tensor:
        """The diagonal of H, float32 ``[in]`` on the CPU; H itself is not read. Raises as ``matrix`` does."""
        return self._read(DIAGONAL, expert)

    def _row(self, expert: int) -> int:
        if not 0 <= expert < self.experts:
            raise IndexError(f"{self._entry.name}: there is no expert {expert} of {self.experts}")
        return self._first + expert

    def _read(self, kind: str, expert: int, *, pinned: bool = False) -> Tensor:
        stored = self._files.tensors[self._entry.name + kind]
        values = torch.empty(stored.shape[-1], dtype=torch.float32, pin_memory=pinned)
        view = memoryview(values.numpy()).cast("B")  # type: ignore[arg-type]
        try:
            file = self._files.storage.open(stored.file)
            try:
                file.read_into(view, stored.offset + self._row(expert) * len(view))
            finally:
                file.close()
        except CheckpointError as error:
            raise CalibrationError(str(error), hint=error.hint) from None
        return values


class Statistics:
    """A folder that ``kbitq calibrate`` wrote; only headers are in memory.

    Attributes:
        path: the folder.
        summary: what it says of itself.
        fingerprint: SHA-256 (hexadecimal) over what is in it: fingerprints of model and text, and every H.
    """

    def __init__(self, path: Path, files: Checkpoint, summary: Summary) -> None:
        self.path, self.summary, self.fingerprint = path, summary, summary.fingerprint
        self._files = files
        self._found = {name: (e, expert) for e in summary.entries for name, expert in e.tensors.items()}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Statistics:
        """Open a folder of statistics.

        Raises:
            CalibrationError: it is none, or cannot be used: a file is missing or cut short, or says what is not so.
        """
        folder = Path(path)
        if not is_statistics(folder):
            raise CalibrationError(
                f"{folder} is not a folder of statistics: it has no {SUMMARY_FILE}",
                hint="run kbitq calibrate, which writes one",
                remedy="no-statistics",
            )
        try:
            files = open_checkpoint(folder)
            where = f"{folder}/{SUMMARY_FILE}"
            summary = parse_summary(parse_json_object(read_all(files.storage, SUMMARY_FILE, _MOST_BYTES), where), where)
        except CheckpointError as error:
            raise CalibrationError(str(error), hint="copy the folder again, or make the statistics again") from None
        for entry in summary.entries:
            _check_stored(files, entry)
        return cls(folder, files, summary)

    def __len__(self) -> int:
        """Weights that there is an H for."""
        return len(self._found)

    @property
    def names(self) -> list[str]:
        """Names of the weights that there is an H for, in the files of the model."""
        return list(self._found)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return self._files.nbytes

    def __getitem__(self, name: str) -> Hessian:
        """H for a tensor, whatever its shape; KeyError where there is none."""
        return Hessian(self._files, *self._found[name])

    def of(self, name: str, shape: Sequence[int]) -> Hessian | None:
        """H for a tensor of the model's files; None where there is none.

        Raises:
            CalibrationError: there is one, but for another number of columns (rows) or experts.
        """
        if name not in self._found:
            return None
        rows, columns = matrix_shape(name, shape)
        experts = shape[0] if is_fused_experts(name, shape) else 1
        found = self[name]
        if (rows // experts if found.transposed else columns, experts) != (found.columns, found.experts):
            raise CalibrationError(
                f"{self.path}: the statistics of {shown(name)} are for {found.columns} "
                + ("rows" if found.transposed else "columns")
                + (f" of {found.experts} experts" if found.experts > 1 or experts > 1 else "")
                + f", but its shape is {list(shape)}",
                hint="these are the statistics of another model: make new ones",
            )
        return found


def is_statistics(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder of statistics, by the file that says so."""
    return (Path(path) / SUMMARY_FILE).is_file()


# --- checks ----------------------------------------------------------------------------------------


def parse_summary(table: Mapping[str, Any], where: str) -> Summary:
    """What a ``calibration.json`` says, checked; ``where`` names it in a CalibrationError."""
    if table.get("format") != FORMAT:
        raise CalibrationError(f"{where} is not what kbitq calibrate writes")
    if table.get("version") not in (VERSION, TRANSPOSED_VERSION):
        raise CalibrationError(
            f"{where} has version {shown(str(table.get('version')))}, and this kbitq reads versions up to "
            f"{TRANSPOSED_VERSION}",
            hint="update kbitq, or make the statistics again",
        )
    about = [table.get(key) for key in ("model", "text", "versions")]
    rows = table.get("hessians")
    if not all(isinstance(value, dict) for value in about) or not isinstance(rows, list):
        raise CalibrationError(f"{where} lacks a part of what kbitq calibrate writes")
    entries = tuple(_entry(row, where) for row in rows)
    names = [name for entry in entries for name in entry.tensors]
    if len(set(names)) != len(names):
        raise CalibrationError(f"{where} has two entries for one tensor")
    model, text, versions = ({**value} for value in about if value is not None)
    return Summary(model, text, versions, entries)


def _entry(row: Any, where: str) -> Entry:
    said = row if isinstance(row, dict) else {}
    columns, block, tokens, digest, tensors = map(said.get, ("columns", "block", "tokens", "sha256", "tensors"))
    transposed = said.get("transposed", False)
    if (
        not _is_count(columns, 1)
        or not (block is None or _is_count(block, 1))
        or not (isinstance(tokens, list) and tokens and all(_is_count(t, 0) for t in tokens))
        or not isinstance(digest, str)
        or not isinstance(transposed, bool)
        or not (isinstance(tensors, dict) and tensors)
        or not all(expert is None or (_is_count(expert, 0) and expert < len(tokens)) for expert in tensors.values())
    ):
        raise CalibrationError(f"{where} has an entry that kbitq calibrate would not write")
    return Entry(columns, block, tuple(tokens), digest, dict(tensors), transposed)


def _is_count(value: Any, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_stored(files: Checkpoint, entry: Entry) -> None:
    """Raise CalibrationError unless the two tensors of an entry are there, with the shapes that it says."""
    elements = triangle_elements(entry.columns, entry.block)
    for kind, length in ((TRIANGLE, elements), (DIAGONAL, entry.columns)):
        found = files.tensors.get(entry.name + kind)
        wanted = stored_shape(entry, length)
        if found is None or (found.dtype, found.shape) != ("F32", wanted):
            raise CalibrationError(
                f"{files.where}: {shown(entry.name + kind)} is {_said(found)}, but {SUMMARY_FILE} says "
                f"F32 {list(wanted)}",
                hint="files of two runs are mixed here: make the statistics again",
            )


def stored_shape(entry: Entry, length: int) -> tuple[int, ...]:
    """Shape of a stored tensor with ``length`` elements an expert."""
    stacked = len(entry.tokens) > 1 or any(expert is not None for expert in entry.tensors.values())
    return (len(entry.tokens), length) if stacked else (length,)


def entry_nbytes(entry: Entry) -> int:
    """Bytes that the stored tensors of an entry have."""
    return hessian_nbytes(entry.columns, entry.block, len(entry.tokens))


def hessian_nbytes(columns: int, block: int | None, experts: int = 1) -> int:
    """Bytes that an H, or those of experts, take in a file."""
    return 4 * experts * (triangle_elements(columns, block) + columns)


def _said(tensor: SourceTensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
