"""Whether a model is run as a whole or layer by layer, from what memory there is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kbitq.calibration.samples import BATCH_TOKENS, windows_at_once
from kbitq.calibration.skeleton import Skeleton
from kbitq.calibration.triangle import blocks
from kbitq.calibration.weights import Weight
from kbitq.checkpoint.source.open import Checkpoint
from kbitq.choose.selection import Selection
from kbitq.errors import CalibrationError
from kbitq.format import is_fused_experts, matrix_shape

_LEAST_K = 2
_SLACK = 1.1  # over weights and sums
_BYTES_PER_VALUE = 16  # of a layer's widest input: the values themselves, in float32 too, and what is made of them


def fits_whole(checkpoint: Checkpoint, block: int | None, device: str, max_memory: int | None) -> bool:
    """Whether all weights and every H fit into the memory of the device, none of them shared.

    Args:
        checkpoint: the model's files.
        block: columns of the blocks that are kept of a wider H.
        device: ``cpu`` or ``cuda``.
        max_memory: bytes of host memory that may be used; None: what is free.
    """
    selection, sums, widest = Selection(_LEAST_K), 0, 0
    for tensor in checkpoint.tensors.values():
        if selection.verdict(tensor.name, tensor.shape, tensor.dtype).quantize:
            experts = tensor.shape[0] if is_fused_experts(tensor.name, tensor.shape) else 1
            columns = matrix_shape(tensor.name, tensor.shape)[1]
            sums, widest = sums + experts * sums_nbytes(columns, block), max(widest, columns)
    need = int((checkpoint.nbytes + sums) * _SLACK) + BATCH_TOKENS * widest * _BYTES_PER_VALUE
    if device == "cpu":
        return need <= (available_memory() if max_memory is None else max_memory)
    on_host = max_memory is None or checkpoint.nbytes * _SLACK <= max_memory  # the model is loaded there first
    return on_host and need <= torch.cuda.mem_get_info()[0]


def check_layers_fit(
    skeleton: Skeleton, weights: Sequence[Weight], windows: Tensor, block: int | None, max_memory: int | None
) -> bool:
    """Whether activations must go to the disk while a model runs layer by layer.

    Args:
        skeleton: the model.
        weights: to collect for.
        windows: int64 ``[n, length]``.
        block: see :func:`fits_whole`.
        max_memory: bytes of host memory that may be used; None: what is free.

    Raises:
        CalibrationError: the largest layer with its H is more than the bound.
    """
    most = 0
    for i in range(len(skeleton.layers)):
        within = f"{skeleton.name}.{i}."
        mine = (w for w in weights if w.name.startswith(within))
        sums = sum((w.experts or 1) * sums_nbytes(w.columns, block) for w in mine)
        most = max(most, skeleton.nbytes(skeleton.within(i)) + (sums if skeleton.device == "cpu" else 0))
    if skeleton.device == "cpu":
        most += skeleton.nbytes(skeleton.around())
    tokens = min(windows.numel(), windows_at_once(windows) * windows.shape[1])
    running = tokens * max(weight.columns for weight in weights) * _BYTES_PER_VALUE
    need, room = int(most * _SLACK) + running, available_memory() if max_memory is None else max_memory
    if max_memory is not None and need > room:
        raise CalibrationError(
            f"one layer with its statistics needs {need:,} bytes, which is more than max_memory ({room:,})",
            argument="max_memory",
            hint=f"allow at least {need:,} bytes, or keep smaller blocks of each H (hessian_block)",
            remedy="layer-memory",
            data={"need": need},
        )
    hidden = skeleton.model.get_input_embeddings().embedding_dim
    between = 2 * windows.numel() * hidden * skeleton.model.dtype.itemsize
    return need + between > room


def sums_nbytes(columns: int, block: int | None) -> int:
    """Bytes of an H while it is summed up, float32: whole matrices, or whole blocks."""
    return 4 * sum(len(part) ** 2 for part in blocks(columns, block))


def available_memory() -> int:
    """Bytes of host memory that a program may use now without swapping; all there is where the system does not say."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            found = {line.partition(":")[0]: line.split()[1] for line in file}
        return int(found["MemAvailable"]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
