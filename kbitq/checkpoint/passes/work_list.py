"""What is left to write of a run, as a stream of work items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kbitq.checkpoint.passes.factors import Factors
from kbitq.checkpoint.passes.levels import LevelSource
from kbitq.checkpoint.passes.pipeline import WorkItem
from kbitq.checkpoint.passes.run_state import RunState
from kbitq.checkpoint.passes.tile_codec import Request
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.open import SourceTensor
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.codecs.base import get_codec
from kbitq.format import block_count, matrix_shape


class WorkList:
    """Cuts tensors into pieces and says how each piece is to be quantized."""

    def __init__(
        self, plan: Plan, reader: TileReader, state: RunState, levels: LevelSource, meter: ProgressMeter, device: str
    ) -> None:
        self._factors = Factors(plan, device)
        self._sources, self._reader, self._state = plan.checkpoint.tensors, reader, state
        self._levels, self._meter = levels, meter

    @property
    def notes(self) -> list[str]:
        """Sentences about the statistics that were used so far."""
        return self._factors.notes()

    def items(self, tensors: Iterable[TensorPlan]) -> Iterator[WorkItem]:
        """The work that is left of these tensors. The one that an earlier run began comes from where that run got."""
        begun = self._state.begun_tensor
        for tensor in tensors:
            if tensor.name in self._state.tensors:
                self._meter.add(tensor.bytes_in, tensor.name)
                continue
            start = begun.position if begun is not None and begun.tensor == tensor.name else 0
            for piece in self._pieces(tensor, start, None):
                yield WorkItem(piece, self._request(tensor, piece))

    def items_between(self, tensor: TensorPlan, start: int, stop: int) -> Iterator[WorkItem]:
        """The work on a part of a tensor: rows ``start`` to ``stop`` of its matrix, or bytes of one that is copied."""
        as_matrix = tensor.quantized or self._sources[tensor.name].scaling is not None
        first = start * matrix_shape(tensor.name, tensor.shape)[1] if as_matrix else start
        for piece in self._pieces(tensor, first, stop):
            yield WorkItem(piece, self._request(tensor, piece))

    def _pieces(self, tensor: TensorPlan, start: int, stop: int | None) -> Iterator[Piece]:
        """``start`` is an element, or a byte of what is copied; ``stop`` a row, or a byte of what is copied."""
        source = self._sources[tensor.name]
        if self._factors.has(tensor):
            return self._whole_rows(tensor, source, start, stop)
        if tensor.quantized or source.scaling is not None:
            cut = get_codec(tensor.codec).cut
            return self._reader.matrix_pieces(source, start, cut, stop, tensor.rows_together)
        return self._reader.byte_pieces(source, start, stop)

    def _request(self, tensor: TensorPlan, piece: Piece) -> Request | None:
        if not tensor.quantized:
            return None
        assert piece.span is not None
        assert tensor.k is not None
        levels, importance = self._levels.levels(tensor), self._levels.importance(tensor, piece.span)
        amax = self._state.scans[tensor.name].amax
        factor = self._factors.of(tensor, piece.span)
        return Request(tensor.codec, tensor.k, levels, amax, tensor.scale, importance, factor, tensor.shape)

    def _whole_rows(self, tensor: TensorPlan, source: SourceTensor, start: int, stop: int | None) -> Iterator[Piece]:
        """Pieces of whole rows of one expert each: large ones, since error feedback walks over the columns of each.

        Of a transposed weight a piece is all rows of an expert; ``start`` and ``stop`` are where one begins.
        """
        rows, cols = matrix_shape(tensor.name, tensor.shape)
        rows = rows if stop is None else stop
        size, per_expert = source.stored_bits // 8, self._factors.rows_of_expert(tensor)
        step = self._factors.rows_of_tile(tensor)
        row = start // cols
        while row < rows:
            count = min(step, per_expert - row % per_expert, rows - row)
            span = Span(row * cols, row * block_count(cols), count, cols, True, True, cols)
            yield Piece(source, span.first_element * size, span.numel * size, span)
            row += count
