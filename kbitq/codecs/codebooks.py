"""Codebooks: the 2^K levels that an index stands for, ascending, the largest magnitude 1 (docs/format.md section 3).

Three ways to get one: ``nf`` (quantiles of the normal distribution), ``optimal`` (least squared error on normal data
under the ``mse`` rule, the default), and any ascending levels of your own from a file or an array (``custom``).
Nothing here depends on the device: levels are numpy float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from kbitq.codecs._optimal_levels import POSITIVE_HALF, TRELLIS_POSITIVE_HALF
from kbitq.errors import CodebookError
from kbitq.format import K_MAX, K_MIN, MIN_LEVEL

Levels = npt.NDArray[np.float32]

#: ``optimal`` for each K: all 2^K levels, ascending and exactly symmetric.
OPTIMAL: dict[int, tuple[float, ...]] = {k: (*(-c for c in reversed(half)), *half) for k, half in POSITIVE_HALF.items()}

#: Names that ``levels`` knows; anything else is taken as a file.
BUILTIN = ("nf", "optimal")

_FILE_HINT = "write the levels as JSON: [...] or {'levels': [...]} or {'3': [...]} by K; or as a safetensors tensor"


def nf(k: int) -> Levels:
    """NormalFloat levels: the normal quantiles of ``(i + 0.5) / 2^k`` divided by the largest. float32 ``[2^k]``."""
    _check_k(k)
    quantile = NormalDist().inv_cdf
    values = np.array([quantile((i + 0.5) / 2**k) for i in range(2**k)])
    return (values / values[-1]).astype(np.float32)


def optimal(k: int) -> Levels:
    """The fixed point of Lloyd's iteration on normal data under the ``mse`` rule. float32 ``[2^k]``.

    ``benchmarks/derive_codebooks.py`` derives the constants.
    """
    _check_k(k)
    return np.array(OPTIMAL[k], np.float32)


def optimal_trellis(k: int, scale_block: int) -> Levels:
    """``optimal`` of the codec ``trellis``: the fixed point of Lloyd's iteration through its encoder, on normal data.

    float32 ``[2^(k + 2)]``; ``scale_block`` is 32 or 128. ``benchmarks/derive_codebooks.py`` derives the constants.
    """
    half = TRELLIS_POSITIVE_HALF[scale_block][k]
    return np.array((*(-c for c in reversed(half)), *half), np.float32)


def normalise(levels: npt.ArrayLike) -> Levels:
    """Levels divided by their largest magnitude; -0 becomes +0, magnitudes under 2^-12 become 0. float32.

    Raises CodebookError unless the levels are a flat list of finite, ascending numbers (equal neighbours are allowed),
    not all zero.
    """
    try:
        values = np.asarray(levels, np.float64)
    except (TypeError, ValueError) as error:
        raise CodebookError("codebook levels must be numbers") from error
    if values.ndim != 1 or not values.size:
        raise CodebookError(f"a codebook must be a flat list of levels, not of shape {values.shape}")
    if not np.isfinite(values).all():
        raise CodebookError(f"codebook level {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    falls = np.flatnonzero(np.diff(values) < 0)
    if falls.size:
        raise CodebookError(f"codebook levels must ascend, but level {int(falls[0]) + 1} is below the one before it")
    peak = np.abs(values).max()
    if peak == 0:
        raise CodebookError("a codebook cannot be all zero")
    unit = (values / peak).astype(np.float32)
    return np.where(np.abs(unit) < np.float32(MIN_LEVEL), np.float32(0), unit)


def levels(spec: Any, k: int) -> tuple[Levels, str]:
    """The levels that ``spec`` names, float32 ``[2^k]``, and their kind: ``nf``, ``optimal`` or ``custom``.

    ``spec`` is one of those two names, a path to a ``.json`` or ``.safetensors`` file, or an array or tensor of 2^k
    levels. Raises CodebookError when there are not 2^k of them, or they are not ascending finite numbers.
    """
    if isinstance(spec, str) and spec in BUILTIN:
        return (nf(k) if spec == "nf" else optimal(k)), spec
    _check_k(k)
    if isinstance(spec, str | Path):
        return _from_file(Path(spec), k), "custom"
    return _custom(_to_numpy(spec), k, "the codebook"), "custom"


def _check_k(k: int) -> None:
    if not K_MIN <= k <= K_MAX:
        raise CodebookError(f"K must be {K_MIN}..{K_MAX}, not {k}")


def _custom(values: Any, k: int, origin: str) -> Levels:
    """Checked and normalised, every complaint naming where the levels came from."""
    try:
        unit = normalise(values)
    except CodebookError as error:
        raise CodebookError(f"{origin}: {error}") from error
    if unit.size != 2**k:
        raise CodebookError(f"{origin}: K={k} takes {2**k} levels, there are {unit.size}")
    return unit


def _to_numpy(values: Any) -> Any:
    """A torch tensor (on any device) as a float64 array; everything else as it is."""
    return values.detach().cpu().double().numpy() if hasattr(values, "detach") else values


# ---------------------------------------------------------------- files


def _from_file(path: Path, k: int) -> Levels:
    suffix = path.suffix.lower()
    if suffix not in (".json", ".safetensors"):
        known = " or ".join(BUILTIN)
        raise CodebookError(f"codebook {path}: neither {known} nor a .json or .safetensors file", hint=_FILE_HINT)
    if not path.is_file():
        raise CodebookError(f"{path}: no such codebook file")
    read = _read_json if suffix == ".json" else _read_safetensors
    return _custom(read(path, k), k, str(path))


def _read_json(path: Path, k: int) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CodebookError(f"{path}: cannot be read as JSON: {error}", hint=_FILE_HINT) from error
    if not isinstance(content, Mapping):
        return content
    for key in (str(k), "levels"):
        if key in content:
            return content[key]
    raise CodebookError(f"{path}: has neither 'levels' nor an entry for K={k}", hint=_FILE_HINT)


def _read_safetensors(path: Path, k: int) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            name = names[0] if len(names) == 1 else "codebook"
            if name not in names:
                raise CodebookError(f"{path}: has {len(names)} tensors and none is named 'codebook'", hint=_FILE_HINT)
            return _to_numpy(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise CodebookError(f"{path}: cannot be read as safetensors: {error}", hint=_FILE_HINT) from error
