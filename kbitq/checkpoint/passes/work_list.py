"""What is left to write of a run, as a stream of work items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kbitq.checkpoint.passes.levels import LevelSource
from kbitq.checkpoint.passes.pipeline import WorkItem
from kbitq.checkpoint.passes.run_state import RunState
from kbitq.checkpoint.passes.tile_codec import Request
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.tile_reader import Piece, TileReader
from kbitq.codecs.base import get_codec


class WorkList:
    """Cuts tensors into pieces and says how each piece is to be quantized."""

    def __init__(
        self, plan: Plan, reader: TileReader, state: RunState, levels: LevelSource, meter: ProgressMeter
    ) -> None:
        self._sources, self._reader, self._state = plan.checkpoint.tensors, reader, state
        self._levels, self._meter = levels, meter

    def items(self, tensors: Iterable[TensorPlan]) -> Iterator[WorkItem]:
        """The work that is left of these tensors. The one that an earlier run began comes from where that run got."""
        begun = self._state.begun_tensor
        for tensor in tensors:
            if tensor.name in self._state.tensors:
                self._meter.add(tensor.bytes_in, tensor.name)
                continue
            start = begun.position if begun is not None and begun.tensor == tensor.name else 0
            for piece in self._pieces(tensor, start):
                yield WorkItem(piece, self._request(tensor, piece))

    def _pieces(self, tensor: TensorPlan, start: int) -> Iterator[Piece]:
        source = self._sources[tensor.name]
        if tensor.quantized or source.scaling is not None:
            return self._reader.matrix_pieces(source, start, get_codec(tensor.codec).cut)
        return self._reader.byte_pieces(source, start)

    def _request(self, tensor: TensorPlan, piece: Piece) -> Request | None:
        if not tensor.quantized:
            return None
        assert piece.span is not None
        assert tensor.k is not None
        levels, importance = self._levels.levels(tensor), self._levels.importance(tensor, piece.span)
        amax = self._state.scans[tensor.name].amax
        return Request(tensor.codec, tensor.k, levels, amax, tensor.scale, importance)
