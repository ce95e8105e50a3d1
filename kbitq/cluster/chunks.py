"""The units of work of a plan that several machines carry out: what each phase consists of, and who does which part.

The phases, each of which needs the results of those before it:

    measure   a tensor in every K that a budget may give it         (only with a budget)
    scan      rows of a tensor: largest magnitude, what is not finite
    fit       a codebook                                             (only where codebooks are fitted)
    write     rows or bytes of a tensor, to their place in the output
    seal      a file: its header, what lies on its shared pages, its checksum

A chunk does not depend on how many parts there are, so another number of parts goes on from what was done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kbitq.checkpoint.passes.levels import family_of, fit_key
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.errors import OptionError
from kbitq.format import matrix_shape

PHASES = ("measure", "scan", "fit", "write", "seal")
LARGEST_CHUNK, SMALLEST_CHUNK = 64 << 20, 4 << 20  # bytes of the source
_CHUNKS_OF_A_RUN = 4096  # a run should have about so many, so that parts come out even


class ChunkKey(NamedTuple):
    """What a chunk is known by: a tensor, codebook or file, and rows or bytes of it."""

    phase: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """A unit of work.

    Attributes:
        phase: one of ``PHASES``.
        name: of a tensor of the source; in ``fit`` of the first tensor of a codebook, in ``seal`` of a file.
        start: the first row of the tensor's matrix, or the first byte of one that is copied.
        stop: the row or byte after the last.
        nbytes: to be read.
    """

    phase: str
    name: str
    start: int
    stop: int
    nbytes: int

    @property
    def key(self) -> ChunkKey:
        return ChunkKey(self.phase, self.name, self.start, self.stop)


@dataclass(frozen=True)
class Part:
    """Part ``index`` (from 0) of ``count``.

    Raises OptionError where there is no such part.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise OptionError(f"there is no part {self}: parts are counted from 0", argument="part")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """This part of the chunks: a run of them, such that all parts have about as many bytes."""
        # A chunk that reads nothing to speak of (a small file to seal) counts a little all the same.
        weights = [c.nbytes + 4096 for c in chunks]
        whole, before, mine = sum(weights), 0, []
        for chunk, weight in zip(chunks, weights, strict=True):
            if (2 * before + weight) * self.count // (2 * whole) == self.index:
                mine.append(chunk)
            before += weight
        return mine


def chunk_bytes(nbytes: int) -> int:
    """The size of the chunks of a source of ``nbytes``."""
    return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, nbytes // _CHUNKS_OF_A_RUN))


def chunks_of(phase: str, plan: Plan, size: int) -> list[Chunk]:
    """The chunks of a phase, in the order of the source. ``plan`` is what the phases before made of it.

    Args:
        phase: one of ``PHASES``.
        plan: the plan.
        size: bytes of the source in a chunk, where tensors are cut.
    """
    return list(_MAKERS[phase](plan, size))


def _measure(plan: Plan, size: int) -> Iterator[Chunk]:
    if plan.options.budget is not None and plan.choice is None:
        for tensor in plan.tensors:
            if tensor.quantized:
                yield Chunk("measure", tensor.name, 0, matrix_shape(tensor.name, tensor.shape)[0], tensor.bytes_in)


def _scan(plan: Plan, size: int) -> Iterator[Chunk]:
    for tensor in plan.tensors:
        if tensor.quantized:
            yield from _rows("scan", tensor, size)


def _fit(plan: Plan, size: int) -> Iterator[Chunk]:
    first: dict[str, TensorPlan] = {}
    sizes: Counter[tuple[str, ...]] = Counter()
    for tensor in plan.tensors:
        if family := family_of(tensor):
            first.setdefault(fit_key(tensor), tensor)
            sizes[family] += tensor.bytes_in
    for tensor in first.values():
        yield Chunk("fit", tensor.name, 0, 0, sizes[family_of(tensor)])


def _write(plan: Plan, size: int) -> Iterator[Chunk]:
    for tensor in plan.tensors:
        source = plan.checkpoint.tensors[tensor.name]
        if tensor.quantized or source.scaling is not None:
            found = plan.hessian(tensor)
            yield from _rows("write", tensor, size, found.columns if found is not None and found.transposed else 1)
        else:  # the bytes of what it decodes to, where the source has it in another format
            for start in range(0, source.nbytes, size):
                stop = min(source.nbytes, start + size)
                yield Chunk("write", tensor.name, start, stop, stop - start)


def _seal(plan: Plan, size: int) -> Iterator[Chunk]:
    for shard in plan.shards:
        yield Chunk("seal", shard.name, 0, shard.nbytes, shard.nbytes)


def _rows(phase: str, tensor: TensorPlan, size: int, together: int = 1) -> Iterator[Chunk]:
    """Whole rows of a matrix, as many as come nearest to ``size`` bytes, and at least one; ``together`` many are not
    parted."""
    rows, _ = matrix_shape(tensor.name, tensor.shape)
    if not tensor.bytes_in:
        return
    step = max(1, size * rows // tensor.bytes_in // together) * together
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield Chunk(phase, tensor.name, start, stop, tensor.bytes_in * (stop - start) // rows)


_MAKERS = {"measure": _measure, "scan": _scan, "fit": _fit, "write": _write, "seal": _seal}
