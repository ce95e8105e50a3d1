"""``rope_scaling`` of the kind llama3, found again from the factors that llama.cpp stores. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # what every Llama 3 model has
_TOLERANCE = 1e-3


def llama3_scaling(freqs: Sequence[float], theta: float) -> dict[str, Any] | None:
    """The fields that give ``freqs`` (what each frequency is divided by), or None where none do."""
    if not freqs or not all(math.isfinite(f) and f > 0 for f in freqs) or not theta > 0:
        return None
    factor = max(freqs)
    expected = (_factor(i, len(freqs), theta, factor) for i in range(len(freqs)))
    if not all(abs(f - e) <= _TOLERANCE * e for f, e in zip(freqs, expected, strict=True)):
        return None
    return {
        "rope_type": "llama3",
        "factor": float(f"{factor:.7g}"),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _factor(index: int, count: int, theta: float, factor: float) -> float:
    wavelength = 2 * math.pi * theta ** (index / count)
    if wavelength < _ORIGINAL / _HIGH:
        return 1.0
    if wavelength > _ORIGINAL / _LOW:
        return factor
    smooth = (_ORIGINAL / wavelength - _LOW) / (_HIGH - _LOW)
    return 1.0 / ((1 - smooth) / factor + smooth)
