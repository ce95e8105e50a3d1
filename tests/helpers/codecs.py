"""Codecs of tests, in the registry for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from kbitq.codecs import base

Own = TypeVar("Own", bound=base.Codec)


@contextmanager
def registered(codec: Own) -> Iterator[Own]:
    base.register(codec)
    try:
        yield codec
    finally:
        base.unregister(codec.name)
