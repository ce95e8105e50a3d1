"""Memory of the fused kernels that outlives a call: partial sums and counters, one set for each device and stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kbitq._core import core

_T = TypeVar("_T")


def to_keep(make: Callable[[], _T], device: torch.device) -> _T:
    """``make()``, on a thread of its own and the caller's stream: for memory that outlives the call.

    While torch.compile warms up for CUDA graphs, what this thread allocates comes from the graphs' pool, where nothing
    may stay that is not an output.
    """
    stream = torch.cuda.current_stream(device)

    def run() -> _T:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


_workspaces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
_GRAPHS = -1  # in place of a stream


def workspace(device: torch.device, capturing: bool | None = None) -> tuple[Tensor, Tensor]:
    """Partial sums and counters, made once for each device and stream, and once for all graphs of a device."""
    if capturing is None:
        capturing = torch.cuda.is_current_stream_capturing()
    index = device.index if device.index is not None else torch.cuda.current_device()
    key = (index, _GRAPHS if capturing else torch.cuda.current_stream(device).cuda_stream)
    if key not in _workspaces:
        _workspaces[key] = to_keep(partial(_new_workspace, torch.device("cuda", index)), device)
        if capturing:
            torch.cuda.synchronize(device)  # the zeros are there whichever stream comes first
    return _workspaces[key]


def _new_workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    sums = torch.empty(core.tiled_workspace_bytes(device.index), dtype=torch.uint8, device=device)
    return sums, torch.zeros(core.tiled_counters, dtype=torch.int32, device=device)
