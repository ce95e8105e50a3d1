"""Which formats a checkpoint has weights of. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from kbitq.formats import awq, awq_fast, bitsandbytes, compressed_tensors, gptq, hqq, mlx, modelopt, mxfp4, torchao
from kbitq.formats.base import Catalogue, Found, check_rows, matrix_of
from kbitq.formats.gguf import weights as gguf
from kbitq.text_safety import shown

Recognise = Callable[[Catalogue], Found]
FORMATS: tuple[Recognise, ...] = (
    gptq.recognise,
    awq.recognise,
    awq_fast.recognise,
    compressed_tensors.recognise,
    bitsandbytes.recognise,
    hqq.recognise,
    mlx.recognise,
    modelopt.recognise,
    mxfp4.recognise,
    torchao.recognise,
    gguf.recognise,
)


def recognise(catalogue: Catalogue) -> Found:
    """All weights of other tools' formats in a checkpoint.

    Raises CheckpointError where tensors do not fit their format, or two weights claim one name.
    """
    found = Found()
    for one in FORMATS:
        more = one(catalogue)
        found.weights += more.weights
        found.dropped.update(more.dropped)
    _check(catalogue, found)
    return found


def _check(catalogue: Catalogue, found: Found) -> None:
    taken = {name for weight in found.weights for name in weight.stored} | found.dropped.keys()
    names: set[str] = set()
    for weight in found.weights:
        if weight.name in names or (weight.name in catalogue.tensors and weight.name not in taken):
            raise catalogue.broken(weight.stored[0], f"{shown(weight.name)}, which it decodes to, is there twice")
        names.add(weight.name)
        check_rows(catalogue, weight, matrix_of(weight)[0])
