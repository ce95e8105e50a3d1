"""What a maker makes: the tensors of a checkpoint in some format, and what the format's own package decodes them to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Case:
    """A small checkpoint.

    Attributes:
        name: of the case.
        config: what its config.json says.
        tensors: as the file stores them.
        decoded: the weights, as the package decodes them.
        metadata: of the file.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    decoded: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)


def digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def weights(out: int, cols: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights ``[out, cols]`` of the size that models have."""
    return (torch.randn(out, cols, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)
