"""Tensor parallelism: which quantized matrices can be split over N devices at block borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kbitq.checkpoint.plan.tensor_plan import TensorPlan
from kbitq.codecs.base import Codec, get_codec
from kbitq.format import BLOCK, is_fused_experts, matrix_shape

SIZES = (1, 2, 4, 8)


def splits(name: str, shape: Sequence[int], size: int, cut: int = BLOCK) -> tuple[bool, bool]:
    """Whether a tensor can be split in ``size`` equal parts along its outputs (rows), and along its inputs (columns).

    Rows lie one after the other, so any equal part will do; columns must be cut where the codec
    may cut a row. Of fused experts each expert's matrix is split.
    """
    rows, cols = matrix_shape(name, shape)
    if is_fused_experts(name, shape):
        rows = shape[1]
    return rows % size == 0, cols % (cut * size) == 0 or size == 1


def refusal(name: str, shape: Sequence[int], size: int, codec: Codec) -> str | None:
    """Why a tensor cannot be split along its inputs over ``size`` devices, as a sentence; None if it can."""
    if splits(name, shape, size, codec.cut)[1]:
        return None
    cols = matrix_shape(name, shape)[1]
    return (
        f"{name}: its {cols} inputs cannot be split over {size} devices: "
        f"the codec {codec.name} cuts a row at multiples of {codec.cut} columns, and {cols} / {size} is none"
    )


def table(tensors: Sequence[TensorPlan]) -> dict[str, dict[str, Any]]:
    """For each size: how many quantized tensors split along outputs and along inputs, and which do along neither.

    ``why`` has the sentences of those that do along outputs alone, where there are any.
    """
    quantized = [t for t in tensors if t.quantized]
    result: dict[str, dict[str, Any]] = {}
    for size in SIZES:
        both = [(t.name, *splits(t.name, t.shape, size, get_codec(t.codec).cut)) for t in quantized]
        why = [
            refusal(t.name, t.shape, size, get_codec(t.codec))
            for t, (_, rows, _) in zip(quantized, both, strict=True)
            if rows
        ]
        result[str(size)] = {
            "outputs": sum(rows for _, rows, _ in both),
            "inputs": sum(cols for _, _, cols in both),
            "neither": [name for name, rows, cols in both if not rows and not cols],
            "not_inputs": [name for name, rows, cols in both if rows and not cols],
            **({"why": said} if (said := [sentence for sentence in why if sentence]) else {}),
        }
    return result
