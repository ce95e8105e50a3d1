"""Decoding FP8 weights with scales (see ``scaling``), tile by tile."""

from __future__ import annotations

import torch

from kbitq.checkpoint.source.open import SourceTensor
from kbitq.checkpoint.source.scaling import EXPONENT_SCALES
from kbitq.checkpoint.source.spans import Span
from kbitq.format import element_count

_EXPONENT_BIAS = 127
_FLOAT_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def scales(scale: SourceTensor, raw: torch.Tensor) -> torch.Tensor:
    """The bytes of a scale tensor as float32 of its shape."""
    if scale.dtype in EXPONENT_SCALES:
        exponents = raw.to(torch.int32)
        values = torch.ldexp(torch.ones(len(raw)), exponents - _EXPONENT_BIAS)
        values[exponents == 255] = torch.nan
        return values.reshape(scale.shape)
    return raw.clone().view(_FLOAT_SCALES[scale.dtype]).float().reshape(scale.shape)


def decode(tensor: SourceTensor, span: Span, stored: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The values of a span in bfloat16, from its FP8 elements ``[rows, cols]`` and all scales of the tensor."""
    assert tensor.scaling is not None
    values = stored.float()
    if table.numel() == 1:
        return values.mul_(table.reshape(())).to(torch.bfloat16)
    height, width = tensor.scaling.block
    cols = tensor.shape[-1]
    per_matrix = tensor.shape[-2]
    table = table.reshape(element_count(tensor.shape[:-2]), -(-per_matrix // height), -(-cols // width))
    elements = torch.arange(span.rows) * span.cols + span.first_element
    rows = elements // cols
    by_row = table[rows // per_matrix, rows % per_matrix // height]  # [span.rows, scales in a row]
    columns = (elements % cols)[:, None] + torch.arange(span.cols) if not span.whole_rows else torch.arange(span.cols)
    index = (columns // width).expand(span.rows, span.cols)
    return values.mul_(by_row.gather(1, index)).to(torch.bfloat16)
