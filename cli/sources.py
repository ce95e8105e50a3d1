"""What a SRC means: a path, or a repository of the Hub that is downloaded first or read over the network."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kbitq.cli.console import console
from kbitq.cli.signals import at_once

if TYPE_CHECKING:
    from kbitq.checkpoint.source.storage import Storage

# Only what may be one pays for importing the Hub's client: org/name or org/name/file.gguf, either with @revision.
_LIKE_A_REPOSITORY = re.compile(r"[^/.~][^/]*/([^/@]+(?<!\.safetensors)(?<!\.gguf)|[^@]+/[^/@]+\.gguf)(@.+)?")


class Found(NamedTuple):
    """Where a source is, and what it is called on the Hub (``org/name@commit``) if it is from there."""

    place: Path | Storage
    base: str | None = None


def local(source: Path) -> Path:
    """The place of a source that is not streamed: the path itself, or a copy of the repository that it names."""
    place = find(source).place
    assert isinstance(place, Path)
    return place


def find(source: Path, *, stream: bool = False) -> Found:
    """The path itself if there is one; else a copy (with ``stream``: the files) of the repository that it names.

    Raises HubError where there is neither.
    """
    text = str(source)
    if os.path.lexists(source) or not _LIKE_A_REPOSITORY.fullmatch(text):
        return Found(source)
    from kbitq import hub

    repo = hub.parse_repo(text)
    if repo is None:
        return Found(source)
    console.note(f"there is no path {text} here, so it is looked up on the Hub")
    if stream:
        storage = hub.HubStorage(repo)
        return Found(storage, f"{repo.id}@{storage.commit}")
    with at_once("run the same command again; the download goes on where it stopped"):
        snapshot = hub.download(repo)
    folder = snapshot if repo.file is None else snapshot.parents[repo.file.count("/")]
    return Found(snapshot, f"{repo.id}@{folder.name}")  # the Hub's cache names a snapshot by its commit
