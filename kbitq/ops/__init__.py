"""The torch operators ``torch.ops.kbitq.*``: the codec here, ``ops.linear`` and ``ops.tiled_linear`` beside it."""

from kbitq.ops.codec import (
    FLOAT_DTYPES,
    STATS_COLUMNS,
    cuda_missing,
    dequantize,
    dequantize_into,
    prepare_importance,
    quantize,
    quantize_into,
    register,
    scan,
    stats,
)
from kbitq.ops.feedback import feedback_into

__all__ = [
    "FLOAT_DTYPES",
    "STATS_COLUMNS",
    "cuda_missing",
    "dequantize",
    "dequantize_into",
    "feedback_into",
    "prepare_importance",
    "quantize",
    "quantize_into",
    "register",
    "scan",
    "stats",
]
