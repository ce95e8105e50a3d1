"""The codec applied to tensors that are never held whole: scan, quantize and measure, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kbitq import ops
from kbitq.checkpoint.passes.run_state import ErrorSums, Scan
from kbitq.checkpoint.source.open import SourceTensor
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import WORTH_A_THREAD, Piece, TileReader
from kbitq.errors import BuildError
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


@dataclass(frozen=True)
class QuantizedSpan:
    """The stored form of a span, on the CPU: int32 ``packed``, uint8 ``absmax``, the tensor's ``codebook``; and what
    ``ops.stats`` says of its rows."""

    span: Span
    packed: torch.Tensor
    absmax: torch.Tensor
    codebook: torch.Tensor
    errors: torch.Tensor


def _now(call: Callable[..., QuantizedSpan], *arguments: object) -> QuantizedSpan:
    return call(*arguments)


def _ready(made: torch.Tensor | Future[QuantizedSpan] | QuantizedSpan) -> torch.Tensor | QuantizedSpan:
    return made.result() if isinstance(made, Future) else made


class TileCodec:
    """Runs the core over the tiles of a reader, on one device."""

    def __init__(self, reader: TileReader, device: str = "cpu") -> None:
        self.reader = reader
        self.device = device

    def scan(self, tensor: SourceTensor) -> Scan:
        """The largest magnitude of a tensor, and what in it is not finite. Reads it once."""
        result = Scan()
        for span in self.reader.spans(tensor):
            self.scan_values(result, span, self.reader.read(tensor, span))
        return result

    def scan_values(self, result: Scan, span: Span, w: torch.Tensor) -> None:
        """Add the values of one span to a scan."""
        amax, status = ops.scan(w.to(self.device))
        count, first = status.tolist()
        result.add(Scan(float(amax), count, span.first_element + first if count else -1))

    def scanned(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Scan]]:
        """Read and scan pieces in order. Yields each with what was found in it alone."""
        for piece, raw in self.reader.stream(pieces):
            assert piece.span is not None
            found = Scan()
            self.scan_values(found, piece.span, self.reader.values(piece.tensor, piece.span, raw))
            yield piece, found

    def quantized(
        self, pieces: Iterable[Piece], request: Callable[[Piece], Request | None]
    ) -> Iterator[tuple[Piece, torch.Tensor | QuantizedSpan]]:
        """Read pieces in order and quantize those that ``request`` answers for. Yields each with its bytes (uint8) or
        its stored form, good until the next is asked for.

        Three pieces are in hand at a time, so that the cores are never idle:

            reader    | read 2     | read 3
            codec     | quantize 1 | quantize 2
            caller    | write 0    | write 1
        """
        with ThreadPoolExecutor(1, thread_name_prefix="kbitq-codec") as pool:
            before: tuple[Piece, torch.Tensor | Future[QuantizedSpan] | QuantizedSpan] | None = None
            for piece, raw in self.reader.stream(pieces):
                wanted = request(piece)
                made: torch.Tensor | Future[QuantizedSpan] | QuantizedSpan = raw
                if wanted is not None:
                    in_thread = piece.count >= WORTH_A_THREAD
                    made = (pool.submit if in_thread else _now)(self._quantize_piece, piece, raw, wanted)
                if before is not None:
                    yield before[0], _ready(before[1])
                before = piece, made
            if before is not None:
                yield before[0], _ready(before[1])

    def _quantize_piece(self, piece: Piece, raw: torch.Tensor, wanted: Request) -> QuantizedSpan:
        assert piece.span is not None
        return self.quantize_span(piece.span, self.reader.values(piece.tensor, piece.span, raw), wanted)

    def quantize_values(
        self,
        span: Span,
        w: torch.Tensor,
        levels: torch.Tensor,
        amax: float,
        scale: str,
        sums: ErrorSums,
        importance: torch.Tensor | None = None,
    ) -> QuantizedSpan:
        """Quantize the values of one span of a finite tensor, and add its errors to ``sums``.

        Args:
            span: the part of the tensor that ``w`` is.
            w: ``[rows, cols]``, of a dtype that the core reads.
            levels: normalised, float32 ``[2^K]``.
            amax: the largest magnitude of the whole tensor.
            scale: ``mse`` or ``absmax``.
            sums: of the tensor so far.
            importance: of the span's columns, as ``ops.quantize`` takes it.
        """
        done = self.quantize_span(span, w, Request(levels, amax, scale, importance))
        sums.add(span, done.errors)
        return done

    def quantize_span(self, span: Span, w: torch.Tensor, wanted: Request) -> QuantizedSpan:
        """Quantize the values of one span, ``w`` ``[rows, cols]`` of a dtype that the core reads."""
        w, levels = w.to(self.device), wanted.levels.to(self.device)
        largest = torch.tensor([wanted.amax], dtype=torch.float32, device=self.device)
        packed = torch.empty((span.rows, block_count(span.cols) * wanted.k), dtype=torch.int32, device=self.device)
        absmax = torch.empty((span.rows, block_count(span.cols)), dtype=torch.uint8, device=self.device)
        codebook = torch.empty_like(levels)
        weights = wanted.importance.to(self.device) if wanted.importance is not None else None
        ops.quantize_into(w, levels, packed, absmax, codebook, amax=largest, importance=weights, scale=wanted.scale)
        errors = ops.stats(w, packed, absmax, codebook)
        return QuantizedSpan(span, packed.cpu(), absmax.cpu(), codebook.cpu(), errors.cpu())


def resolve_devices(wanted: str) -> tuple[str, ...]:
    """The devices to compute on: for ``auto`` every GPU or else the CPU, for ``cuda`` every GPU, or those named.

    Raises BuildError where CUDA, or a GPU that is named (``cuda:0,cuda:1``), cannot be had.
    """
    if wanted == "cpu":
        return ("cpu",)
    reason = ops.cuda_missing()
    if reason is not None:
        if wanted == "auto":
            return ("cpu",)
        raise BuildError(
            f"device {wanted} cannot be used: {reason}", hint="kbitq env shows what was found", argument="device"
        )
    present = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    if wanted in ("auto", "cuda"):
        return present
    names = tuple(dict.fromkeys(name.strip() for name in wanted.split(",")))
    if unknown := [name for name in names if name not in present]:
        raise BuildError(
            f"device {wanted} cannot be used: {unknown[0]} is none of {', '.join(present)}",
            hint="kbitq env shows what was found",
            argument="device",
        )
    return names


def resolve_device(wanted: str) -> str:
    """The one device for work that is not shared out: the first of :func:`resolve_devices`."""
    return resolve_devices(wanted)[0]
