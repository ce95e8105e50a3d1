"""A lane: the place of one tile in flight on a device, and the cutting of tiles that are too large for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from kbitq import ops
from kbitq.checkpoint.passes.tile_codec import QuantizedSpan
from kbitq.checkpoint.source.spans import Span
from kbitq.codecs.base import Codec
from kbitq.ops.dtypes import TORCH_DTYPES

MIN_STRIP_BYTES = 64 << 10  # a GPU without room even for this is out of memory


class Lane:
    """A device, a stream on it, and page-locked host buffers for what goes in and comes out.

    ``device`` may be the CPU, where nothing is page-locked and nothing waits.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.is_cuda else None
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, nbytes: int) -> torch.Tensor:
        """``nbytes`` of this lane's host memory, uint8; what it held before is overwritten."""
        if name not in self._buffers or self._buffers[name].numel() < nbytes:
            self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)
        return self._buffers[name][:nbytes]

    def outputs(self, span: Span, codec: Codec, k: int) -> QuantizedSpan:
        """Room for a quantized span in the lane's host memory, the widest elements first, so that all are aligned."""
        wanted = [(p.name, p.shape, TORCH_DTYPES[p.dtype]) for p in codec.parts("", (span.rows, span.cols), k)]
        wanted.append(("", (span.sums, ops.STATS_COLUMNS), torch.float64))
        wanted.sort(key=lambda room: -room[2].itemsize)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in wanted]
        pieces = self.buffer("out", sum(sizes)).split(sizes)
        rooms = {n: data.view(dtype).view(shape) for data, (n, shape, dtype) in zip(pieces, wanted, strict=True)}
        errors = rooms.pop("")
        return QuantizedSpan(span, codec, k, rooms, errors)

    def wait(self) -> None:
        """Return when everything queued on the lane is done."""
        if self.stream is not None:
            self.stream.synchronize()


class Strips:
    """Queues the work on a tile in strips: runs of rows that the devices of ``lanes`` have room for.

    ``strip_bytes`` of a tile's values at once; a device that is short of memory makes it smaller for all that follow.
    """

    def __init__(self, lanes: Sequence[Lane], strip_bytes: int) -> None:
        self._lanes = lanes
        self._most = {True: sys.maxsize, False: strip_bytes}  # by whether a tile is wanted whole

    def queue(
        self,
        strip: Callable[[slice], None],
        values: torch.Tensor,
        lane: Lane,
        *,
        divisible: bool = True,
        whole: bool = False,
    ) -> None:
        """Call ``strip(rows)`` for all rows of ``values`` in order, on the lane's stream.

        Once, if not ``divisible``; once, too, if ``whole`` and the device has room: work that takes as long for few
        rows as for many. Raises torch.OutOfMemoryError where even the smallest strip is too large.
        """
        total, row_bytes, first = values.shape[0], values.shape[1] * values.element_size(), 0
        with torch.cuda.stream(lane.stream):
            while first < total:
                rows = min(total - first, max(1, self._most[whole] // row_bytes)) if divisible else total
                try:
                    strip(slice(first, first + rows))
                except torch.OutOfMemoryError:
                    if rows == 1 or not divisible or rows * row_bytes <= MIN_STRIP_BYTES:
                        raise
                    self._most[whole] = rows * row_bytes // 2
                    self._make_room()
                else:
                    first += rows

    def _make_room(self) -> None:
        """Let every tile in flight end, and give its memory back."""
        for lane in self._lanes:
            lane.wait()
        torch.cuda.empty_cache()
