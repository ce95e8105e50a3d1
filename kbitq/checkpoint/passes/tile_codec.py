"""The codec applied to one tile: scan it, quantize it and measure the error. CPU and GPU pipelines both call this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kbitq import ops
from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.source.open import SourceTensor
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.format import block_count


@dataclass(frozen=True)
class Request:
    """How a span is to be quantized: normalised ``levels`` (float32 ``[2^K]``), its tensor's largest magnitude, the
    scale rule, and the importance of the span's columns as ``ops.quantize`` takes it.
    """

    levels: torch.Tensor
    amax: float
    scale: str
    importance: torch.Tensor | None = None

    @property
    def k(self) -> int:
        return self.levels.numel().bit_length() - 1

    def of_rows(self, rows: slice) -> Request:
        """The request for some rows of the span. One row of importance is for all rows."""
        if self.importance is None or len(self.importance) == 1:
            return self
        return replace(self, importance=self.importance[rows])


class QuantizedTile(NamedTuple):
    """What the core makes of a tile, on the tile's device: int32 ``packed`` ``[rows, blocks * K]``, uint8 ``absmax``
    ``[rows, blocks]``, the tensor's float32 ``codebook`` ``[2^K]``, and the result of ``ops.stats``."""

    packed: torch.Tensor
    absmax: torch.Tensor
    codebook: torch.Tensor
    errors: torch.Tensor


@dataclass(frozen=True)
class QuantizedSpan:
    """A quantized tile on the CPU, and the span of its tensor that it is."""

    span: Span
    packed: torch.Tensor
    absmax: torch.Tensor
    codebook: torch.Tensor
    errors: torch.Tensor


def quantize_tile(w: torch.Tensor, levels: torch.Tensor, request: Request) -> QuantizedTile:
    """Quantize a tile and measure its errors. On a GPU this queues the work and waits for nothing.

    Args:
        w: ``[rows, cols]``, of a dtype that the core reads, on any device.
        levels: those of ``request``, on the device of ``w``.
        request: for exactly these rows.
    """
    rows, blocks, device = len(w), block_count(w.shape[1]), w.device
    packed = torch.empty((rows, blocks * request.k), dtype=torch.int32, device=device)
    absmax = torch.empty((rows, blocks), dtype=torch.uint8, device=device)
    codebook = torch.empty_like(levels)
    amax = torch.full((1,), request.amax, dtype=torch.float32, device=device)
    weights = request.importance.to(device) if request.importance is not None else None
    ops.quantize_into(w, levels, packed, absmax, codebook, amax=amax, importance=weights, scale=request.scale)
    return QuantizedTile(packed, absmax, codebook, ops.stats(w, packed, absmax, codebook))


def scan_result(first_element: int, amax: torch.Tensor, status: torch.Tensor) -> Scan:
    """The result of ``ops.scan`` on elements of a tensor, the first of which is ``first_element``."""
    count, first = status.tolist()
    return Scan(amax.item(), count, first_element + first if count else -1)


class TileCodec:
    """Scans and quantizes single tiles of a reader, on one device; a call returns when the work is done."""

    def __init__(self, reader: TileReader, device: str = "cpu") -> None:
        self.reader, self.device = reader, device

    def scan(self, tensor: SourceTensor) -> Scan:
        """The largest magnitude of a tensor, and what in it is not finite. Reads it once."""
        found = Scan()
        for span in self.reader.spans(tensor):
            found.add(self.scan_span(span, self.reader.read(tensor, span)))
        return found

    def scan_span(self, span: Span, w: torch.Tensor) -> Scan:
        """Scan the values of one span, ``w`` ``[rows, cols]``."""
        return scan_result(span.first_element, *ops.scan(w.to(self.device)))

    def quantize_span(self, span: Span, w: torch.Tensor, request: Request) -> QuantizedSpan:
        """Quantize the values of one span of a finite tensor, ``w`` ``[rows, cols]`` of a dtype that the core reads."""
        made = quantize_tile(w.to(self.device), request.levels.to(self.device), request)
        return QuantizedSpan(span, *(part.cpu() for part in made))
