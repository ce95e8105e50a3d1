"""A quantized tensor beside the tensor that it was made from."""

from __future__ import annotations

from kbitq.checkpoint.passes.run_state import ErrorSums
from kbitq.checkpoint.source.open import Checkpoint, SourceTensor
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.checkpoint.written.stored import StoredTensor, read_constants, read_span
from kbitq.codecs.base import span_stats
from kbitq.errors import CheckpointError


def matching_source(source: Checkpoint, tensor: StoredTensor) -> SourceTensor:
    """The tensor of ``source`` that ``tensor`` was made from. Raises CheckpointError where there is none that fits."""
    original = source.tensors.get(tensor.name)
    if original is None:
        raise CheckpointError(f"{source.where} has no tensor {tensor.name}: it is not the source")
    if (original.shape, original.dtype) != (tensor.meta.shape, tensor.meta.dtype):
        raise CheckpointError(
            f"{source.describe(original)} is {original.dtype} {list(original.shape)}, but {tensor.meta.dtype} "
            f"{list(tensor.meta.shape)} was quantized: it is not the source"
        )
    return original


def measure_tensor(stored: TileReader, tensor: StoredTensor, plain: TileReader, original: SourceTensor) -> ErrorSums:
    """The error of a stored tensor against its original."""
    error_sums, constants = ErrorSums(), read_constants(stored, tensor)
    for span in plain.spans(original, cut=tensor.codec.cut):
        parts = read_span(stored, tensor, span, constants)
        error_sums.add(span, span_stats(tensor.codec, plain.read(original, span), parts, span))
    return error_sums
