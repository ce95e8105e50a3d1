"""The instruction set that the core computes with, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from kbitq import _C


@contextmanager
def at_level(level: str) -> Iterator[str]:
    """One of ``_C.simd_levels()``."""
    before = _C.simd()
    _C.set_simd(level)
    try:
        yield level
    finally:
        _C.set_simd(before)
