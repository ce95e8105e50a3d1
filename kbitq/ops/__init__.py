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

__all__ = [
    "FLOAT_DTYPES",
    "STATS_COLUMNS",
    "cuda_missing",
    "dequantize",
    "dequantize_into",
    "prepare_importance",
    "quantize",
    "quantize_into",
    "register",
    "scan",
    "stats",
]
