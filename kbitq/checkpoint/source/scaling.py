"""FP8 with scales, as published checkpoints store it: recognised from headers (``fp8`` decodes it).

A weight ``X`` of dtype F8_E4M3 (or F8_E5M2) goes with ``X_scale_inv`` or ``X_scale``: one scale for the tensor, one
for each row, or one for each block (DeepSeek: 128 x 128), as float32, bfloat16, float16 or a bare exponent (ue8m0). The
value is FP8 * scale in float32, rounded to bfloat16, which is what the tools that run such models compute.
"""

from __future__ import annotations

from dataclasses import replace

from kbitq.checkpoint.source.open import Checkpoint, Scaling, SourceTensor
from kbitq.errors import CheckpointError
from kbitq.format import CONFIG_KEY, element_count

DECODED_DTYPE = "BF16"
FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
ACTIVATION_SCALE = ".input_scale"
DEFAULT_BLOCK = 128
FLOAT_SCALES = ("F32", "BF16", "F16")
EXPONENT_SCALES = ("F8_E8M0", "U8")  # a byte b means 2^(b - 127); 255 is NaN


def resolve(checkpoint: Checkpoint) -> dict[str, str]:
    """Turn scaled FP8 weights of a checkpoint into tensors that decode, and take their scales out.

    Returns the names of the tensors taken out, each with the reason. Raises CheckpointError where scales do not fit.
    """
    dropped: dict[str, str] = {}
    tensors = checkpoint.tensors
    for name, tensor in list(tensors.items()):
        if tensor.dtype not in FP8_DTYPES:
            continue
        scale = next((tensors[name + suffix] for suffix in SCALE_SUFFIXES if name + suffix in tensors), None)
        if scale is None:
            continue
        block = _block(checkpoint, tensor, scale)
        tensors[name] = replace(tensor, dtype=DECODED_DTYPE, scaling=Scaling(tensor.dtype, scale, block))
        dropped[scale.name] = f"folded into {name}"
        activation = name.removesuffix(".weight") + ACTIVATION_SCALE
        if activation in tensors:
            dropped[activation] = f"activation scale of the FP8 form of {name}"
    for name in dropped:
        del tensors[name]
    return dropped


def _block(checkpoint: Checkpoint, tensor: SourceTensor, scale: SourceTensor) -> tuple[int, int]:
    """Rows and columns that share a scale. Raises CheckpointError unless the scale's shape fits."""
    if scale.dtype not in FLOAT_SCALES and scale.dtype not in EXPONENT_SCALES:
        raise CheckpointError(f"{checkpoint.describe(scale)}: {scale.dtype} is not known as the dtype of a scale")
    if len(tensor.shape) < 2 or element_count(scale.shape) == 1:
        if element_count(scale.shape) == 1:
            return max(element_count(tensor.shape), 1), max(element_count(tensor.shape), 1)
        raise _misfit(checkpoint, tensor, scale)
    lead, rows, cols = tensor.shape[:-2], tensor.shape[-2], tensor.shape[-1]
    if scale.shape in ((*lead, rows), (*lead, rows, 1)):
        return 1, max(cols, 1)
    config = (checkpoint.config or {}).get(CONFIG_KEY)
    size = config.get("weight_block_size") if isinstance(config, dict) else None
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(s, int) and s > 0 for s in size)):
        size = [DEFAULT_BLOCK, DEFAULT_BLOCK]
    if scale.shape != (*lead, -(-rows // size[0]), -(-cols // size[1])):
        raise _misfit(checkpoint, tensor, scale)
    return size[0], size[1]


def _misfit(checkpoint: Checkpoint, tensor: SourceTensor, scale: SourceTensor) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.describe(scale)}: its shape {list(scale.shape)} does not fit {tensor.name} {list(tensor.shape)}",
        hint="quantize the bfloat16 version of this model",
    )
