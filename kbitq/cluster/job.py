"""A plan that several machines carry out, as one process sees it: the phase at hand, what is done, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kbitq.checkpoint.allocation import spend
from kbitq.checkpoint.output.destination import is_file_name
from kbitq.checkpoint.output.staging import SharedStaging
from kbitq.checkpoint.passes.levels import fit_key
from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.passes.scan_pass import nonfinite_error, without_nonfinite
from kbitq.cluster.attempts import Journals
from kbitq.cluster.chunks import PHASES, Chunk, chunks_of
from kbitq.cluster.plan_file import layout_digest, open_plan
from kbitq.cluster.results import levels_of, measured_of, merged_scan
from kbitq.errors import CheckpointError


class Job:
    """One process's view of the work. ``update`` reads the journals and goes on to the phase that is next.

    Attributes:
        file: the plan's file.
        plan: as far as the finished phases decide it.
        phase: the first that is not complete; ``seal`` stays when all is done.
        chunks: of that phase.
        layout: digest of ``plan``, which every result of the phase bears.
        scans: of the tensors, by name, once that phase is complete.
        levels: fitted codebooks by ``fit_key``, once that phase is complete.
        gains: what fitting gained, in dB, by tensor.
    """

    def __init__(self, path: Path, device: str | None = None) -> None:
        self.file, self.plan = open_plan(path, device)
        self.staging = SharedStaging(self.file.out)
        if not self.staging.folder.is_dir():
            raise CheckpointError(
                f"{self.staging.folder} is missing: the plan was finished, or {path} is on a machine that does not "
                "share that disk",
                remedy="plan-again",
            )
        self.journals = Journals(self.file.journals, self.file.hash)
        self.scans: dict[str, Scan] = {}
        self.levels: dict[str, torch.Tensor] = {}
        self.gains: dict[str, float] = {}
        self.written: list[Chunk] = []
        self._sizes: dict[str, int] = {}
        self._begin(PHASES[0])
        self.update()

    @property
    def to_folder(self) -> bool:
        return not is_file_name(self.file.out)

    def update(self) -> bool:
        """Read the journals, and go on to later phases as far as all before are complete. Whether anything is new.

        Raises NonFiniteError, SelectionError or BudgetError where the results say that the run must end.
        """
        grew = self.journals.update()
        while self.phase != PHASES[-1] and not self.missing():
            _FOLDS[self.phase](self)
            self._begin(PHASES[PHASES.index(self.phase) + 1])
        return grew

    def missing(self) -> list[Chunk]:
        """The chunks of the phase that nobody has done."""
        return [c for c in self.chunks if not self.is_done(c)]

    def is_done(self, chunk: Chunk) -> bool:
        """Whether a chunk of the phase at hand is done."""
        where = chunk.key, self.layout
        return where in self.journals.results or where in self.journals.places

    def result(self, chunk: Chunk) -> Any:
        """The result of a chunk of this phase, or of one that was written."""
        return self.journals.result(chunk.key, self.layout)

    def by_tensor(self, chunks: Sequence[Chunk]) -> dict[str, list[Chunk]]:
        """Chunks by the name that they are of, in order."""
        groups: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            groups.setdefault(chunk.name, []).append(chunk)
        return groups

    def bytes_done(self) -> tuple[int, int]:
        """Bytes of the source that are read, and that are to be read, in the phases up to ``write``."""
        here = PHASES.index(self.phase)
        done = sum(self._sizes[phase] for phase in PHASES[: min(here, len(PHASES) - 1)])
        if self.phase != PHASES[-1]:
            done += sum(c.nbytes for c in self.chunks if self.is_done(c))
        return done, sum(self._sizes.values())

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self.chunks = chunks_of(phase, self.plan, self.file.chunk_bytes)
        self.layout = layout_digest(self.plan)
        for later in PHASES[PHASES.index(phase) : -1]:
            chunks = self.chunks if later == phase else chunks_of(later, self.plan, 1 << 62)
            self._sizes[later] = sum(c.nbytes for c in chunks)


def _fold_measure(job: Job) -> None:
    budget = job.plan.options.budget
    if budget is not None and job.chunks:
        job.plan = spend(job.plan, budget, {c.name: measured_of(job.result(c)) for c in job.chunks})


def _fold_scan(job: Job) -> None:
    plan = job.plan
    groups = job.by_tensor(job.chunks)
    job.scans = {name: merged_scan(map(job.result, chunks)) for name, chunks in groups.items()}
    if plan.options.on_nonfinite == "error":
        for tensor in plan.tensors:
            if tensor.quantized and job.scans[tensor.name].nonfinite:
                raise nonfinite_error(plan.checkpoint, plan.checkpoint.tensors[tensor.name], job.scans[tensor.name])
    job.plan = without_nonfinite(plan, job.scans)


def _fold_fit(job: Job) -> None:
    tensors = {t.name: t for t in job.plan.tensors}
    gains: dict[str, float] = {}
    for chunk in job.chunks:
        tensor = tensors[chunk.name]
        assert tensor.k is not None
        key = fit_key(tensor)
        job.levels[key], gains[key] = levels_of(job.result(chunk), tensor.k)
    job.gains = {n: gains[fit_key(t)] for n, t in tensors.items() if t.quantized and fit_key(t) in gains}


def _fold_write(job: Job) -> None:
    job.written = job.chunks


_FOLDS: Mapping[str, Callable[[Job], None]] = {
    "measure": _fold_measure, "scan": _fold_scan, "fit": _fold_fit, "write": _fold_write,
}  # fmt: skip
