"""The compiled core, or a sentence when it is not there. The only module that imports ``kbitq._C``."""

from __future__ import annotations

from kbitq.errors import BuildError

try:
    from kbitq import _C as core  # noqa: N811  # a module, named as torch names its own
except ImportError as error:
    raise BuildError(
        f"kbitq's compiled core (kbitq._C) is not installed for this Python: {error}",
        hint="in the source tree run `pip install -e .` (or `make test`); elsewhere `pip install kbitq`",
    ) from error

try:
    core.simd()  # the first question settles the level: what KBITQ_SIMD asks for must be there
except ValueError as error:
    raise BuildError(str(error), hint="unset KBITQ_SIMD, or give one that this machine has") from None

__all__ = ["core"]
