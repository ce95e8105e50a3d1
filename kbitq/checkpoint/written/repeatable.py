"""Whether a tensor can be made again from its source: by what its metadata, or the ledger, says of how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbitq.choose.importance import Importance
from kbitq.text_safety import shown


def needs_more_than_source(made: Mapping[str, Any], given: Importance | None) -> str | None:
    """Why the source, and the importance file ``given``, do not give the bytes of a tensor again; None if they do.

    ``made``: what its metadata, or its row of the ledger, says under ``calibrated`` and ``importance``.
    """
    if made.get("calibrated") is not None:
        return "made with error feedback, whose bytes depend on the device and its number of threads"
    wanted = made.get("importance")
    if wanted is None or (given is not None and given.sha256 == wanted):
        return None
    which = "an importance file, which was not given" if given is None else "another importance file than was given"
    return f"made with {which} (its SHA-256 begins with {shown(str(wanted)[:12])})"
