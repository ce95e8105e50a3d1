"""Weights that mean nothing, of the shapes and codings that a folder has: a server measures its speed without files."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kbitq.codecs.base import Coding, Request, get_codec, part_kinds

_ROWS = 16  # of a matrix that is encoded: its rows are repeated
_DEVIATION = 0.02


def parts_of(coding: Coding, rows: int, cols: int, device: torch.device) -> dict[str, Tensor]:
    """The parts of a matrix ``[rows, cols]``.

    Raises:
        CodecError: there is no such codec. CodebookError: it has not this K.
    """
    kinds, times = part_kinds(coding[0]), -(-rows // _ROWS)
    return {
        name: (held if kinds[name] else held.repeat(times, *[1] * (held.dim() - 1))[:rows]).to(device)
        for name, held in _few_rows(coding, cols).items()
    }


def dense(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An ordinary weight ``[rows, cols]``."""
    few = _values(cols).to(device, dtype)
    return few.repeat(-(-rows // _ROWS), 1)[:rows]


@lru_cache(maxsize=64)
def _few_rows(coding: Coding, cols: int) -> dict[str, Tensor]:
    name, k = coding
    codec, values = get_codec(name), _values(cols)
    levels, _ = codec.levels("optimal", k)
    request = Request(
        k, values.abs().amax().reshape(1), "absmax", None if levels is None else torch.from_numpy(levels),
        shape=(_ROWS, cols),
    )  # fmt: skip
    return codec.encode(values, request)


def _values(cols: int) -> Tensor:
    made = torch.randn(_ROWS, cols, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    return made * _DEVIATION
