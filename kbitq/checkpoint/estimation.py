"""How long a planned run will take and whether it fits: measured for up to a second on this machine, not guessed."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kbitq.checkpoint.output.destination import disk_free
from kbitq.checkpoint.passes.devices import resolve_device
from kbitq.checkpoint.passes.factors import Factors
from kbitq.checkpoint.passes.tile_codec import Request, TileCodec
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.source.memory import tile_bytes
from kbitq.checkpoint.source.spans import Span
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.codecs.base import get_codec
from kbitq.codecs.feedback import factorise
from kbitq.format import element_count, matrix_shape
from kbitq.ops.dtypes import TORCH_DTYPES

_ROWS, _COLS = 512, 2048  # of the tile that is timed: large enough for all threads
_READ_BYTES = 64 << 20
_FACTOR_COLS = {"cpu": 1024, "cuda": 4096}  # of the H that is timed; a GPU takes as long for a smaller one


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        disk_needed: bytes on the output's disk while the run lasts.
        disk_free: bytes that disk has.
        peak_memory: bytes beyond the interpreter with torch.
        seconds: of the whole run.
        values_per_second: quantized, measured here with the plan's commonest dtype, K and rule.
        read_bytes_per_second: of the source, measured here.
    """

    disk_needed: int
    disk_free: int
    peak_memory: int
    seconds: float
    values_per_second: float
    read_bytes_per_second: float

    @property
    def fits(self) -> bool:
        return self.disk_needed <= self.disk_free

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def estimate(plan: Plan, seconds: float = 1.0) -> Estimate:
    """Time the codec for about ``seconds`` on this machine, and a read of the source, and reckon the run from that.

    A run that would take less is timed for as long as it would take.

    Raises BuildError where the plan's device cannot be had, CheckpointError where the source cannot be read.
    """
    values = sum(element_count(t.shape) for t in plan.tensors if t.quantized)
    selected = sum(t.bytes_in for t in plan.tensors if t.quantized)
    rate, reading = _codec_rate(plan, values, seconds), _read_rate(plan)
    took = values / rate + _factor_seconds(plan) + (plan.bytes_in + (0 if plan.spool_bytes else selected)) / reading
    return Estimate(
        plan.disk_needed,
        disk_free(plan.out),
        plan.peak_memory,
        took,
        rate,
        reading,
    )


def _codec_rate(plan: Plan, values: int, seconds: float) -> float:
    """Values a second that are scanned, quantized and measured, with the plan's commonest dtype, K and rule.

    With error feedback, if a tensor of these gets it. Measured on no more than ``values``, nor longer than ``seconds``.
    """
    tensors = [t for t in plan.tensors if t.k is not None]
    (dtype, k, scale, codec_name), _ = Counter((t.dtype, t.k, t.scale, t.codec) for t in tensors).most_common(1)[0]
    assert k is not None
    core_dtype = TORCH_DTYPES[dtype] if dtype != "F64" else torch.float32
    device = resolve_device(plan.device)
    rows = _rows_of_sample(plan, torch.device(device).type)
    w = torch.randn(rows, _COLS, generator=torch.Generator().manual_seed(0)).to(core_dtype)
    span, levels = Span(0, 0, rows, _COLS, True, True, _COLS), get_codec(codec_name).levels("optimal", k)[0]
    usual = None if levels is None else torch.from_numpy(levels.copy())
    factor = None
    if (found := next((h for t in tensors if (h := plan.hessian(t)) is not None), None)) is not None:
        factor = factorise(torch.eye(rows if found.transposed else _COLS), transposed=found.transposed)
    request = Request(codec_name, k, usual, 8.0, scale, factor=factor)
    with TileReader(plan.checkpoint) as reader:
        codec = TileCodec(reader, device)
        codec.quantize_span(span, w, request)  # the first call also starts threads
        rounds, started = 0, time.perf_counter()
        while rounds == 0 or (rounds * w.numel() < values and time.perf_counter() - started < seconds):
            codec.scan_span(span, w)
            codec.quantize_span(span, w, request)
            rounds += 1
        return rounds * w.numel() / (time.perf_counter() - started)


def _rows_of_sample(plan: Plan, device_type: str) -> int:
    """Rows of the tile that is timed.

    With error feedback a GPU takes as long for few rows as for many, so they are as many as it takes at once on
    average: weights over the columns that it walks over.
    """
    walked = [t for t in plan.tensors if (h := plan.hessian(t)) is not None and not h.transposed]
    if device_type == "cpu" or not walked:
        return _ROWS
    factors, weights, columns = Factors(plan, device_type), 0, 0
    for tensor in walked:
        rows, cols = matrix_shape(tensor.name, tensor.shape)
        of_expert = factors.rows_of_expert(tensor)
        tiles = rows // of_expert * -(-of_expert // factors.rows_of_tile(tensor))
        weights, columns = weights + rows * cols, columns + tiles * cols
    return max(1, weights // columns)


def _factor_seconds(plan: Plan) -> float:
    """Seconds that the H of a plan's calibration take to be factorised, each once; by the cube of their columns."""
    found = {h.tensors: h for t in plan.tensors if (h := plan.hessian(t)) is not None}
    if not found:
        return 0.0
    device = torch.device(resolve_device(plan.device))
    sample = torch.eye(_FACTOR_COLS[device.type], device=device)
    factorise(sample)  # the first call also loads a library
    started = time.perf_counter()
    float(factorise(sample).upper[0, 0])
    took = time.perf_counter() - started
    return took * sum(h.experts * (len(part) / len(sample)) ** 3 for h in found.values() for part in h.parts)


def _read_rate(plan: Plan) -> float:
    """Bytes a second that the source's largest tensor is read with (from memory, if the system has it there)."""
    tensor = max(plan.checkpoint.tensors.values(), key=lambda t: t.nbytes)
    size, done = min(tile_bytes(plan.options.max_memory), tensor.nbytes), 0
    with TileReader(plan.checkpoint) as reader:
        started = time.perf_counter()
        while done + size <= min(_READ_BYTES, tensor.nbytes):
            reader.read_bytes(tensor, done, size)
            done += size
        return max(done, 1) / max(time.perf_counter() - started, 1e-9)
