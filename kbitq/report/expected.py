"""What a tensor is held against: the SQNR that normal weights have with the same K, codebook and scale rule."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from kbitq.codecs.codebooks import BUILTIN
from kbitq.errors import KbitqError
from kbitq.quantized import quantize

_SHAPE, _SEED = (1024, 1024), 2024  # values of N(0,1): enough for 0.01 dB

STEPS = (-4.0, -2.0, -1.0, -0.5, -0.25, 0.25)
"""Where one colour of the map of SQNR ends and the next begins: dB above the expectation, below it if negative."""

CHANGES = (-9.0, -3.0, -0.25, 0.25, 3.0, 9.0)
"""The same for the map of changes, in dB; one K more is 6 dB."""

_FITTED = ("fit", "fit-shared")  # what is fitted to normal weights is optimal


def is_named(levels: str) -> bool:
    """Whether the name of a tensor's levels says which they are on normal weights."""
    return levels in (*BUILTIN, *_FITTED)


def expected_db(codec: str, k: int, name: str, scale: str, levels: tuple[float, ...] | None = None) -> float | None:
    """SQNR in dB of N(0,1).

    Args:
        codec: how weights are coded.
        k: bits of an index.
        name: of the levels, as the metadata has it.
        scale: the rule for scales.
        levels: of a codebook that has no name.

    Returns:
        None for levels or a rule that are not known here, as of a later version of kbitq.
    """
    if not is_named(name) and levels is None:
        return None
    try:
        return _measured(codec, k, "optimal" if name in _FITTED else name, scale, levels)
    except (ValueError, KbitqError):
        return None


@lru_cache(maxsize=256)
def _measured(codec: str, k: int, name: str, scale: str, levels: tuple[float, ...] | None) -> float | None:
    book = name if levels is None else torch.tensor(levels)
    return quantize(_normal_values(), k, scale=scale, codebook=book, codec=codec).sqnr_db


@lru_cache(maxsize=1)
def _normal_values() -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(_SEED).standard_normal(_SHAPE).astype(np.float32))


def step_of(value: float | None, limits: tuple[float, ...]) -> str:
    """The name of a value's colour: ``step0`` (of changes ``gain0``) for the lowest; ``none``: not measured."""
    return "none" if value is None else step_names(limits)[sum(value >= limit for limit in limits)]


def step_names(limits: tuple[float, ...]) -> list[str]:
    """The names of all colours of a map, from the lowest."""
    kind = "gain" if limits == CHANGES else "step"
    return [f"{kind}{i}" for i in range(len(limits) + 1)]
