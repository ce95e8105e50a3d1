"""A codec applied to one tile: scan it, encode it and measure the error. CPU and GPU pipelines both call this."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kbitq import ops
from kbitq.checkpoint.passes.run_state import Scan
from kbitq.checkpoint.source.open import SourceTensor
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.codecs import base, feedback
from kbitq.codecs.base import Codec, get_codec, span_stats


@dataclass(frozen=True)
class Request:
    """How a span is to be quantized.

    Attributes:
        codec: name of the codec.
        k: bits of an index.
        levels: normalised, float32, on the CPU; None for a codec without levels.
        amax: the largest magnitude of the whole tensor.
        scale: the scale rule.
        importance: of the span's columns, as ``ops.quantize`` takes it.
        factor: for error feedback, where it is wanted; then the span is of whole rows, or a whole transposed matrix.
        shape: of the whole tensor.
    """

    codec: str
    k: int
    levels: torch.Tensor | None
    amax: float
    scale: str
    importance: torch.Tensor | None = None
    factor: feedback.Factor | None = None
    shape: tuple[int, ...] = ()

    @property
    def divisible(self) -> bool:
        """Whether the rows of the span can be quantized apart."""
        return self.factor is None or not self.factor.transposed

    def of_rows(self, rows: slice) -> Request:
        """The request for some rows of the span. One row of importance is for all rows."""
        if self.importance is None or len(self.importance) == 1:
            return self
        return replace(self, importance=self.importance[rows])

    def on(self, device: torch.device, levels: torch.Tensor | None) -> base.Request:
        """What the codec is asked, on a device that ``levels`` are on already."""
        amax = torch.full((1,), self.amax, dtype=torch.float32, device=device)
        weights = self.importance.to(device) if self.importance is not None else None
        return base.Request(self.k, amax, self.scale, levels, weights, self.shape)


@dataclass(frozen=True)
class QuantizedSpan:
    """A quantized tile on the CPU: the span that it is, its ``parts``, and what the codec's ``stats`` say of them."""

    span: Span
    codec: Codec
    k: int
    parts: dict[str, torch.Tensor]
    errors: torch.Tensor


def quantize_tile(
    w: torch.Tensor, span: Span, levels: torch.Tensor | None, request: Request
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Encode a tile and measure its errors. On a GPU this queues the work and waits for nothing.

    Args:
        w: ``[rows, cols]``, of a dtype that the core reads, on any device.
        span: that ``w`` is, or is some rows of.
        levels: those of ``request``, on the device of ``w``.
        request: for exactly these rows.

    Returns:
        The tile's parts and the result of ``span_stats``, on the device of ``w``.
    """
    codec = get_codec(request.codec)
    asked = request.on(w.device, levels)
    if request.factor is None:
        parts = codec.encode(w, asked)
    else:
        parts = feedback.encode(codec, w, asked, request.factor.to(w.device))
    return parts, span_stats(codec, w, parts, span)


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
        levels = request.levels.to(self.device) if request.levels is not None else None
        parts, errors = quantize_tile(w.to(self.device), span, levels, request)
        on_cpu = {name: part.cpu() for name, part in parts.items()}
        return QuantizedSpan(span, get_codec(request.codec), request.k, on_cpu, errors.cpu())
