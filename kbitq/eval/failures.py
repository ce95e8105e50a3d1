"""What goes wrong inside a model or a tokenizer that another library runs, as a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kbitq.errors import KbitqError, first_line


@contextmanager
def told(what: str) -> Iterator[None]:
    """Runs a block; turns what it raises into a KbitqError that begins with ``what``.

    A config.json or a tokenizer of no sense makes other libraries raise anything. Memory that runs out, packages that
    are missing and errors that are a sentence already stay what they are.
    """
    try:
        yield
    except (KbitqError, MemoryError, torch.OutOfMemoryError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise KbitqError(f"{what}: {first_line(error)}") from error
