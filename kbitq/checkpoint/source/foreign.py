"""Weights in other tools' formats as tensors of a source: the catalogue that ``kbitq.formats`` recognises them in."""

from __future__ import annotations

from collections.abc import Mapping

from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.errors import CheckpointError
from kbitq.formats.base import PEEK_BYTES, Catalogue, ForeignWeight, Stored, plain_nbytes
from kbitq.formats.recognise import recognise
from kbitq.text_safety import shown

# Files and a key of config.json in which tools describe what they made: AutoGPTQ, AutoAWQ, ModelOpt; MLX.
_DESCRIPTIONS = frozenset(("quantize_config.json", "quant_config.json", "hf_quant_config.json"))
_MLX_KEY = "quantization"


def resolve(checkpoint: Checkpoint) -> dict[str, str]:
    """Turn weights of other tools' formats into tensors that decode, and take what they are made of out.

    Returns the names of the tensors taken out, each with what became of it. Raises CheckpointError where tensors do not
    fit their format.
    """
    found = recognise(catalogue_of(checkpoint))
    if not found.weights:
        return {}
    dropped = dict(found.dropped)
    decoded: dict[str, SourceTensor] = {}
    for weight in found.weights:
        parts = tuple(checkpoint.tensors[name] for name in weight.stored)
        decoded[weight.stored[0]] = _tensor(weight, parts)
        dropped.update((part.name, f"folded into {weight.name}") for part in parts)
    tensors: dict[str, SourceTensor] = {}
    for name, tensor in checkpoint.tensors.items():  # a weight takes the place of its codes
        if name in decoded:
            tensors[decoded[name].name] = decoded[name]
        elif name not in dropped:
            tensors[name] = tensor
    checkpoint.tensors = tensors
    checkpoint.schemes = schemes(found.weights)
    if checkpoint.schemes:
        _forget_descriptions(checkpoint)
    return {name: reason for name, reason in dropped.items() if name not in tensors}


def _forget_descriptions(checkpoint: Checkpoint) -> None:
    """Take out what says how the source is quantized, beside ``quantization_config``: it is not true of an output."""
    if checkpoint.config is not None:
        checkpoint.config = {key: value for key, value in checkpoint.config.items() if key != _MLX_KEY}
    for name in [name for name in checkpoint.carried if name in _DESCRIPTIONS]:
        checkpoint.carried.remove(name)
        del checkpoint.carried_sizes[name]
        checkpoint.notes.append(f"{name} is not carried over: it says how the source is quantized")


def has_foreign_weights(checkpoint: Checkpoint) -> bool:
    """Whether any of a checkpoint's weights are in another tool's format that is read here."""
    return bool(recognise(catalogue_of(checkpoint)).weights)


def schemes(weights: list[ForeignWeight]) -> dict[str, int]:
    """How many weights a checkpoint has of each scheme, the most frequent first."""
    counts: dict[str, int] = {}
    for weight in weights:
        if weight.scheme:
            counts[weight.scheme] = counts.get(weight.scheme, 0) + 1
    return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def _tensor(weight: ForeignWeight, parts: tuple[SourceTensor, ...]) -> SourceTensor:
    first = parts[0]
    return SourceTensor(
        weight.name, weight.dtype, weight.shape, first.file, first.offset, plain_nbytes(weight), None, weight, parts
    )


def catalogue_of(checkpoint: Checkpoint) -> Catalogue:
    """What the formats are shown of a checkpoint."""
    metadata: dict[str, str] = {}
    for header in checkpoint.headers.values():
        metadata.update(header.metadata)
    tensors: Mapping[str, SourceTensor] = checkpoint.tensors

    def peek(name: str) -> bytes:
        tensor = tensors[name]
        if tensor.nbytes > PEEK_BYTES:
            raise CheckpointError(f"{checkpoint.describe(tensor)} has {tensor.nbytes:,} bytes, far more than expected")
        file = checkpoint.storage.open(tensor.file)
        try:
            buffer = bytearray(tensor.nbytes)
            file.read_into(memoryview(buffer), tensor.offset)
            return bytes(buffer)
        finally:
            file.close()

    return Catalogue(
        checkpoint.where,
        {t.name: Stored(t.name, t.dtype, t.shape, t.nbytes) for t in tensors.values()},
        checkpoint.config or {},
        metadata,
        peek,
    )


def note(checkpoint: Checkpoint) -> str | None:
    """The sentence that warns of a source that is quantized already; None for one that is not."""
    if not checkpoint.schemes:
        return None
    kinds = list(checkpoint.schemes)
    listed = "; ".join(kinds[:3]) + (f" and {len(kinds) - 3} more" if len(kinds) > 3 else "")
    count = sum(checkpoint.schemes.values())
    return f"{count} weights are quantized already ({shown(listed)}): what that cost adds to the errors told here"
