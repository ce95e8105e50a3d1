"""The step of error feedback inside a block of ``planes`` (:mod:`kbitq.codecs.feedback`), on the CPU and on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from kbitq._core import core
from kbitq.ops.codec import stream_of


def feedback_into(w: Tensor, triangle: Tensor, scales: Tensor, levels: Tensor, packed: Tensor) -> None:
    """Round the columns of a block one by one, taking each error from the columns to its right.

    Args:
        w: float32 ``[rows, n]``, n <= 32: what is left of the weights. Overwritten with the errors, each divided by its
            diagonal element of ``triangle``.
        triangle: float32 ``[n, n]``, the block of U on its diagonal.
        scales: float32 ``[rows]``, decoded.
        levels: float32 ``[2^K]``, as stored (with the tensor's power of two).
        packed: int32 ``[rows, K]``, written: the bit planes of the indices.

    Raises:
        ValueError: an argument's type, shape or device does not fit; the message names it.
    """
    core.feedback(w, triangle, scales, levels, packed, torch.get_num_threads(), stream_of(w))
