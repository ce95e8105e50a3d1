"""Sources that are quantized already, by kbitq or by another tool: recognised by name, never misread."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from kbitq.checkpoint.source import foreign, scaling
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor, open_checkpoint
from kbitq.checkpoint.source.storage import Storage
from kbitq.errors import CheckpointError
from kbitq.format import CODEBOOK_SUFFIX, CONFIG_KEY, METADATA_KEY, PACKED_SUFFIX, QUANT_METHOD

# quant_method of config.json -> the name its users know.
_METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "MXFP4",
    "fbgemm_fp8": "FBGEMM FP8",
    "modelopt": "ModelOpt",
    "torchao": "torchao",
    "quanto": "quanto",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "exl2": "EXL2",
    "exl3": "EXL3",
}
FP8_METHOD = "fp8"
_UNQUANTIZED = "quantize the original model (often the repository that this one's card calls its base model)"


def is_kbitq(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was written by kbitq, by its metadata, its config or the names of its tensors."""
    config = (checkpoint.config or {}).get(CONFIG_KEY)
    if isinstance(config, dict) and config.get("quant_method") == QUANT_METHOD:
        return True
    if any(METADATA_KEY in header.metadata for header in checkpoint.headers.values()):
        return True
    return any(
        name.endswith(PACKED_SUFFIX) and name.removesuffix(PACKED_SUFFIX) + CODEBOOK_SUFFIX in checkpoint.tensors
        for name in checkpoint.tensors
    )


def open_source(source: str | os.PathLike[str] | Storage) -> Checkpoint:
    """Open a checkpoint that is to be quantized: weights in formats that are read decode, others are refused."""
    checkpoint = open_checkpoint(source)
    prepare_source(checkpoint)
    return checkpoint


def prepare_source(checkpoint: Checkpoint) -> None:
    """Make an opened checkpoint a source. Raises CheckpointError for one whose weights are not plain numbers."""
    refuse_kbitq(checkpoint)
    checkpoint.dropped = foreign.resolve(checkpoint)
    refuse_quantized(checkpoint)
    checkpoint.dropped |= scaling.resolve(checkpoint)
    if (warning := foreign.note(checkpoint)) is not None:
        checkpoint.notes.append(warning)
    if foreign_config(checkpoint.config) != FP8_METHOD:
        return
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in scaling.FP8_DTYPES:
            raise CheckpointError(
                f"{checkpoint.describe(tensor)} is FP8, and there are no scales for it ({tensor.name}_scale_inv)",
                hint=_UNQUANTIZED,
            )


def refuse_kbitq(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a source that kbitq wrote."""
    if is_kbitq(checkpoint):
        raise CheckpointError(
            f"{checkpoint.where} is already quantized by kbitq",
            hint="take the original model; dequantize_checkpoint comes close to it",
            remedy="original",
            data={"path": checkpoint.where},
        )


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where weights are left that are quantized in a way that is not read here."""
    tool = foreign_tensors(checkpoint.tensors.values())
    if tool is None and not checkpoint.schemes:
        tool = foreign_config(checkpoint.config)
    if tool is not None and tool != FP8_METHOD:
        raise CheckpointError(f"{checkpoint.where} is already quantized with {tool}", hint=_UNQUANTIZED)


def foreign_config(config: Mapping[str, Any] | None) -> str | None:
    """The tool that a config.json's quantization_config names, or None."""
    for part in ("", "text_config", "llm_config", "language_config"):
        section = (config or {}).get(part) if part else config
        raw = section.get(CONFIG_KEY) if isinstance(section, dict) else None
        if isinstance(raw, dict):
            method = str(raw.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in raw else "an unknown tool"))
            return _METHODS.get(method.lower(), method)
    return None


def foreign_tensors(tensors: Iterable[SourceTensor]) -> str | None:
    """The tool whose marks the tensor names and dtypes bear, or None."""
    dtypes = {t.name: t.dtype for t in tensors}
    for name, dtype in dtypes.items():
        stem = name.rsplit(".", 1)[0]
        if name.endswith(".qweight") and stem + ".scales" in dtypes:
            return "GPTQ" if stem + ".g_idx" in dtypes else "AWQ or GPTQ"
        if ".quant_state.bitsandbytes__" in name or (name.endswith(".weight.absmax") and stem in dtypes):
            return "bitsandbytes"
        if name.endswith(".SCB") and dtypes.get(stem + ".weight") == "I8":
            return "bitsandbytes (int8)"
        if name.endswith(".weight_packed") and name.removesuffix("_packed") + "_scale" in dtypes:
            return "compressed-tensors"
        if name.endswith(".weight") and dtype == "U8" and name + "_scale" in dtypes:
            return "ModelOpt (NVFP4)"
        if name.endswith("_blocks") and dtype == "U8" and dtypes.get(name.removesuffix("_blocks") + "_scales") == "U8":
            return "MXFP4"
        if name.endswith((".trellis", ".q_weight")) and stem + (".suh" if ".trellis" in name else ".q_scale") in dtypes:
            return "ExLlama"
    return None
