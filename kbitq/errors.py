"""Every error kbitq raises on purpose. Imports nothing, so that any module may raise one."""

from __future__ import annotations


class KbitqError(Exception):
    """Base of all errors meant for a reader: one sentence that names the file and the tensor, and what is wrong.

    ``hint`` is the next step (usually a command), shown on a line of its own by the command line.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


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

    def __init__(self, message: str, *, tensor: str, count: int, first: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.tensor, self.count, self.first = tensor, count, first


class SelectionError(KbitqError):
    """A pattern matches nothing, or the options leave nothing to quantize."""


class CodebookError(KbitqError, ValueError):
    """A codebook file or array is not 2^K ascending finite levels."""


class ImportanceError(KbitqError):
    """An importance file cannot be read, or an entry of it does not fit its tensor."""


class BudgetError(KbitqError):
    """No choice of K fits the size that was given."""


class BuildError(KbitqError, ImportError):
    """The compiled core is missing, or was built without what was asked of it."""
