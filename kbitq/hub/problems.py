"""What the Hub's client raises, as sentences that say what to do."""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import get_session, get_token
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
from huggingface_hub.utils import logging

from kbitq.errors import CheckpointError, KbitqError, first_line

_AGAIN = "run the command again in a while; it goes on where it stopped"
_LOGIN = "hf auth login (or set HF_TOKEN) with an account that may"


class HubError(CheckpointError):
    """The Hub refused, does not have it, or could not be reached."""


def _transport_error() -> type[Exception]:
    """The base of the client's connection errors; which library it is depends on huggingface_hub's version."""
    library = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    return library.HTTPError


def check_token(*, needed: bool) -> None:
    """Raise HubError where the token is none that could be sent, or with ``needed`` where there is none."""
    token = get_token()
    if token is None and needed:
        raise HubError("there is no token for the Hub", hint=f"{_LOGIN} do this")
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise HubError(
            "the token for the Hub has a character that no token has", hint="set HF_TOKEN anew, or hf auth login again"
        )


def redacted(text: str) -> str:
    """``text`` without the token for the Hub: what a client or a server says may repeat what was sent."""
    for token in (get_token(), os.environ.get("HF_TOKEN", "").strip()):
        text = text.replace(token, "(the token)") if token else text
    return text


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Runs a block; turns what the client raises into a HubError that begins with ``what``, e.g. the repository.

    Errors of this machine's files and memory stay what they are. Any other is the client's or the Hub's: it may send
    an answer that the client cannot make sense of. The client's warnings are not shown: they speak of its own options.
    """
    try:
        with _quiet():
            yield
    except (KbitqError, MemoryError, ImportError):
        raise
    except Exception as error:
        explanation = _explain(error)
        if explanation is None and isinstance(error.__cause__, Exception):
            explanation = _explain(error.__cause__)  # an upload's threads raise it from within another
        if explanation is None:
            if isinstance(error, OSError) and error.errno:
                raise
            explanation = (f"the Hub's client failed ({first_line(error)})", _AGAIN)
        raise HubError(redacted(f"{what}: {explanation[0]}"), hint=explanation[1]) from error


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


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
        return f"the Hub could not be reached ({first_line(error)})", "check the network, then run it again"
    return None


def _explain_status(error: HfHubHTTPError) -> tuple[str, str | None]:
    status = error.response.status_code if error.response is not None else 0
    said = f": {error.server_message}" if error.server_message else ""
    if status in (401, 403):
        return f"the Hub refused ({status}{said})", f"{_LOGIN} do this"
    if status == 404:
        return f"not found{said}", "check the name"
    if status == 429:
        return f"the Hub limits requests (429{said})", _AGAIN
    if status >= 500:
        return f"the Hub has a fault ({status}{said})", _AGAIN
    return f"the Hub answered {status}{said}", None
