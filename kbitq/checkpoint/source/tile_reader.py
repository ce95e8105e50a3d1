"""Reading tensor data: row tiles of bounded size, by positioned reads into one buffer that is used again and again.

Nothing is mapped and no tensor is held whole, so the memory in use is a few times the tile, whatever the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import torch

from kbitq.checkpoint.source import fp8
from kbitq.checkpoint.source.memory import DEFAULT_TILE_BYTES, MIN_TILE_BYTES
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.open_files import OpenFiles
from kbitq.checkpoint.source.spans import Span, spans
from kbitq.checkpoint.source.stored_values import TensorValues
from kbitq.format import BLOCK, matrix_shape, stored_dtype
from kbitq.formats.base import ForeignWeight, matrix_of
from kbitq.ops.dtypes import TORCH_DTYPES

_BAND_TILES = 1  # of a matrix in another format that is read by columns
WORTH_A_THREAD = 256 << 10  # bytes; what is smaller is done before a thread would have begun


def _arrived(data: Future[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    return data if isinstance(data, torch.Tensor) else data.result()


@dataclass(frozen=True)
class Piece:
    """Bytes ``[start, start + count)`` of a tensor; ``span`` is the part of its matrix, None for plain bytes."""

    tensor: SourceTensor
    start: int
    count: int
    span: Span | None


class TileReader:
    """Reads tensors, a tile at a time, into buffers used again and again: what a call returned the next overwrites."""

    def __init__(self, checkpoint: Checkpoint, tile_bytes: int = DEFAULT_TILE_BYTES) -> None:
        self.checkpoint = checkpoint
        self.tile_bytes = max(tile_bytes, MIN_TILE_BYTES)
        self._buffers: dict[str, torch.Tensor] = {}
        self._files = OpenFiles(checkpoint)
        self._decoding = Lock()  # of the scales at hand
        self._scale: tuple[str, torch.Tensor] = ("", torch.empty(0))
        self._stored: tuple[str, TensorValues | None] = ("", None)  # of the weight in another format at hand

    def __enter__(self) -> TileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def spans(
        self, tensor: SourceTensor, start: int = 0, cut: int = BLOCK, stop_row: int | None = None, together: int = 1
    ) -> Iterator[Span]:
        """The spans of a tensor's matrix that fit a tile, from element ``start`` on; ``cut``: where rows may be cut.

        ``stop_row`` is the row to end before; None: all rows. ``together``: rows that stay in one span.
        """
        return self.matrix_spans(tensor.name, tensor.shape, tensor.dtype, start, cut, stop_row, together)

    def matrix_spans(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        start: int = 0,
        cut: int = BLOCK,
        stop_row: int | None = None,
        together: int = 1,
    ) -> Iterator[Span]:
        """The same for a tensor that is not stored as such."""
        rows, cols = matrix_shape(name, shape)
        last = rows if stop_row is None else stop_row
        return spans(last, cols, self.tile_bytes * 8 // stored_dtype(dtype).bits, start, cut, together)

    def matrix_pieces(
        self, tensor: SourceTensor, start: int = 0, cut: int = BLOCK, stop_row: int | None = None, together: int = 1
    ) -> Iterator[Piece]:
        """A tensor as spans of its matrix, from element ``start`` on, up to ``stop_row``."""
        size = tensor.stored_bits // 8
        for span in self.spans(tensor, start, cut, stop_row, together):
            yield Piece(tensor, span.first_element * size, span.numel * size, span)

    def byte_pieces(self, tensor: SourceTensor, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """A tensor as plain bytes, from byte ``start`` on, up to ``stop``."""
        end = tensor.nbytes if stop is None else stop
        for at in range(start, end, self.tile_bytes):
            yield Piece(tensor, at, min(self.tile_bytes, end - at), None)

    def stream(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Read pieces in order, the next one in a thread while the caller works on this one.

        Yields uint8 data, each good until the next but one is asked for.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="kbitq-read") as pool:
            ready: tuple[Piece, Future[torch.Tensor] | torch.Tensor] | None = None
            for turn, piece in enumerate(pieces):
                # Three buffers in turn: one is being read, the caller may work on two.
                request = (piece.tensor, piece.start, piece.count, f"ahead {turn % 3}")
                if piece.count < WORTH_A_THREAD:
                    coming: Future[torch.Tensor] | torch.Tensor = self.read_bytes(*request)
                else:
                    coming = pool.submit(self.read_bytes, *request)
                if ready is not None:
                    yield ready[0], _arrived(ready[1])
                ready = piece, coming
            if ready is not None:
                yield ready[0], _arrived(ready[1])

    def read(self, tensor: SourceTensor, span: Span) -> torch.Tensor:
        """The elements of a span, ``[rows, cols]``, in a dtype that the core reads."""
        size = tensor.stored_bits // 8
        return self.values(tensor, span, self.read_bytes(tensor, span.first_element * size, span.numel * size))

    def values(self, tensor: SourceTensor, span: Span, raw: torch.Tensor) -> torch.Tensor:
        """The bytes of a span as its elements ``[rows, cols]``: float64 rounded to float32, FP8 scaled."""
        if tensor.scaling is not None:
            stored = raw.reshape(-1).view(TORCH_DTYPES[tensor.scaling.stored]).view(span.rows, span.cols)
            return fp8.decode(tensor, span, stored, self._scales(tensor.scaling.scale))
        values = raw.reshape(-1).view(TORCH_DTYPES[tensor.dtype]).view(span.rows, span.cols)
        return values.float() if values.dtype == torch.float64 else values

    def chunks(self, tensor: SourceTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes of a tensor: position in the tensor and uint8 data, a tile at a time."""
        for piece in self.byte_pieces(tensor):
            yield piece.start, self.read_bytes(tensor, piece.start, piece.count)

    def read_bytes(self, tensor: SourceTensor, start: int, count: int, buffer: str = "") -> torch.Tensor:
        """``count`` bytes of a tensor from byte ``start`` of it, uint8, in the reader's buffer of that name."""
        if buffer not in self._buffers or self._buffers[buffer].numel() < count:
            self._buffers[buffer] = torch.empty(count, dtype=torch.uint8)
        view = self._buffers[buffer][:count]
        self.read_into(tensor, start, view)
        return view

    def read_into(self, tensor: SourceTensor, start: int, target: torch.Tensor) -> None:
        """Fill ``target`` (uint8, on the CPU) with bytes of a tensor from byte ``start`` of it; from any thread."""
        if tensor.foreign is not None:
            self._decode_into(tensor, tensor.foreign, start, target)
        elif target.numel():
            with self._files.in_use(tensor.file) as file:
                file.read_into(target.numpy().data, tensor.offset + start)

    def _decode_into(self, tensor: SourceTensor, weight: ForeignWeight, start: int, target: torch.Tensor) -> None:
        """Fill ``target`` with bytes of a decoded weight: its rows that they lie in are decoded."""
        rows, cols = matrix_of(weight)
        dtype = TORCH_DTYPES[tensor.dtype]
        row_bytes = cols * dtype.itemsize
        done, limit = 0, max(1, self.tile_bytes // max(row_bytes, 1))
        while done < target.numel():
            first, within = divmod(start + done, row_bytes)
            whole = 0 if within else min((target.numel() - done) // row_bytes, limit, rows - first)
            wanted = whole or min(-(-(within + target.numel() - done) // row_bytes), limit, rows - first)
            count = min(wanted * row_bytes - within, target.numel() - done)
            part, place = target[done : done + count], None
            if whole and part.storage_offset() % dtype.itemsize == 0 == part.data_ptr() % dtype.itemsize:
                place = part.view(dtype).view(whole, cols)
            decoded = weight.decode(self._values_of(tensor), first, wanted, place)
            if decoded is not place:
                part.copy_(decoded.contiguous().view(-1).view(torch.uint8)[within : within + count])
            done += count

    def _values_of(self, tensor: SourceTensor) -> TensorValues:
        """How the tensors that a weight is made of are read; those of the last weight are kept."""
        with self._decoding:
            name, values = self._stored
            if values is None or name != tensor.name:
                values = TensorValues(self.checkpoint, self._files, tensor.parts, _BAND_TILES * self.tile_bytes)
                self._stored = tensor.name, values
            return values

    def check_unchanged(self) -> None:
        """Raise SourceChangedError if a file that was read is no longer the one whose header was planned with."""
        self._files.check_unchanged()

    def _scales(self, scale: SourceTensor) -> torch.Tensor:
        """The scales of an FP8 tensor, float32; those of the last tensor are kept."""
        with self._decoding:
            if self._scale[0] != scale.name:
                raw = self.read_bytes(scale, 0, scale.nbytes, "scales")
                self._scale = scale.name, fp8.scales(scale, raw)
            return self._scale[1]
