"""What the Hub's client raises, as sentences that say what to do."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import get_session
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kbitq.errors import CheckpointError

_LOGIN = "hf auth login (or set HF_TOKEN) with an account that may"


class HubError(CheckpointError):
    """The Hub refused, does not have it, or could not be reached."""


def _transport_error() -> type[Exception]:
    """The base of the client's connection errors; which library it is depends on huggingface_hub's version."""
    library = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    return library.HTTPError


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Runs a block; turns what the client raises into a HubError that begins with ``what``, e.g. the repository."""
    try:
        yield
    except Exception as error:
        explanation = _explain(error)
        if explanation is None:
            raise
        raise HubError(f"{what}: {explanation[0]}", hint=explanation[1]) from error


def _explain(error: Exception) -> tuple[str, str | None] | None:
    """A clause and a hint for an exception of the client; None for any other."""
    if isinstance(error, GatedRepoError):
        return "access is gated", f"ask for access on the repository's page, then {_LOGIN} read it"
    if isinstance(error, RevisionNotFoundError):
        return "there is no such revision", "give a branch, a tag or a commit after the @"
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return "it is not in the local cache, and the Hub is offline (HF_HUB_OFFLINE) or out of reach", None
    if isinstance(error, EntryNotFoundError):
        return "there is no such file", None
    if isinstance(error, RepositoryNotFoundError):
        return "no such repository, or it is private", f"check the name; {_LOGIN} read it"
    if isinstance(error, HFValidationError):
        return f"not a repository's name ({error})", None
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error)
    if isinstance(error, _transport_error() | ConnectionError | TimeoutError):
        return f"the Hub could not be reached ({type(error).__name__}: {error})", "check the network, then run it again"
    return None


def _explain_status(error: HfHubHTTPError) -> tuple[str, str | None]:
    status = error.response.status_code if error.response is not None else 0
    said = f": {error.server_message}" if error.server_message else ""
    again = "run the command again in a while; it goes on where it stopped"
    if status in (401, 403):
        return f"the Hub refused ({status}{said})", f"{_LOGIN} do this"
    if status == 404:
        return f"not found{said}", "check the name"
    if status == 429:
        return f"the Hub limits requests (429{said})", again
    if status >= 500:
        return f"the Hub has a fault ({status}{said})", again
    return f"the Hub answered {status}{said}", None
