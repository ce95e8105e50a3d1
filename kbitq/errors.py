"""Every error kbitq raises on purpose. Imports only ``text_safety``, so that any module may raise one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbitq.text_safety import printable


class KbitqError(Exception):
    """Base of all errors meant for a reader: one sentence that names the file and the tensor, and what is wrong.

    Names in it may come from a hostile file, so the message is made printable here.

    ``hint`` is the next step. Two more say it for those who give arguments in another way, as the command line does
    (``kbitq.cli.errors``): ``argument`` is the name of the argument that is at fault, as the message has it, and
    ``remedy`` the name of the next step, ``data`` what that one is about.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, argument: str | None = None, remedy: str | None = None,
        data: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(printable(message))
        self.hint, self.argument, self.remedy, self.data = hint, argument, remedy, dict(data or {})


def first_line(error: BaseException) -> str:
    """The first line of what another library raised, and the second where that ends in a colon; its type if bare."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    said = " ".join(lines if lines and lines[0].endswith(":") else lines[:1])
    return said if " " in said else f"{type(error).__name__} {said}".strip()


class CheckpointError(KbitqError):
    """A source or output on disk cannot be used: missing, truncated, a header that lies, a link out of the folder."""


class FormatError(CheckpointError):
    """A quantized checkpoint breaks the rules of docs/format.md; the message names the tensor."""


class SourceChangedError(CheckpointError):
    """A file of the source is not the one any more that the plan was made from."""


class OutputExistsError(CheckpointError):
    """The output's final name is taken and overwriting was not asked for."""


class NoSpaceError(CheckpointError):
    """The disk cannot hold, or could no longer hold, the output."""


class NonFiniteError(KbitqError):
    """A tensor to be quantized has NaN or infinite values. ``tensor``, ``count``, ``first`` (flat index) say which."""

    def __init__(self, message: str, *, tensor: str, count: int, first: int, **told: Any) -> None:
        super().__init__(message, **told)
        self.tensor, self.count, self.first = tensor, count, first


class SelectionError(KbitqError):
    """A pattern matches nothing, or the options leave nothing to quantize."""


class OptionError(KbitqError, ValueError):
    """An option that there is not, or a value that it does not take. ``argument`` is its name."""


class CodebookError(KbitqError, ValueError):
    """A codebook file or array is not 2^K ascending finite levels."""


class CodecError(KbitqError, ValueError):
    """A codec is not known here, or cannot do what is asked of it."""


class ImportanceError(KbitqError):
    """An importance file cannot be read, or an entry of it does not fit its tensor."""


class CalibrationError(KbitqError):
    """Statistics of a model cannot be read, do not fit a tensor, or cannot be made."""


class BudgetError(KbitqError):
    """No choice of K fits the size that was given."""


class ClusterError(KbitqError):
    """A cluster cannot be reached, or its workers cannot do the work."""


class BuildError(KbitqError, ImportError):
    """The compiled core is missing, or was built without what was asked of it."""
