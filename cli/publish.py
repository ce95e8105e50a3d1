"""Verify, describe, upload: what ``kbitq push`` and ``kbitq quantize --push`` share."""

from __future__ import annotations

import json
import re
import shlex
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import typer

from kbitq import checkpoint, hub
from kbitq.card.usage import auto_class
from kbitq.checkpoint.output.checksums import format_checksums, read_checksums
from kbitq.checkpoint.source.header import parse_json_object
from kbitq.checkpoint.source.side_files import SUMS_FILE
from kbitq.checkpoint.source.storage import LocalFolderStorage
from kbitq.cli import cards
from kbitq.cli.console import console
from kbitq.cli.signals import at_once
from kbitq.errors import CheckpointError
from kbitq.format import CONFIG_FILE


def target(repository: str, revision: str | None = None) -> hub.Repo:
    """The repository to publish to, which may well be the name of a folder here too. A usage error unless org/name."""
    if not re.fullmatch(r"[^/@.~][^/@]*/[^/@]+", repository):
        raise typer.BadParameter(f"{repository!r} is not a repository; write it as org/name.")
    return hub.Repo(repository, revision)


class Prepared(NamedTuple):
    """What is uploaded besides the files of a checkpoint: its card, and the content of others by name."""

    card: str
    instead: dict[str, bytes]


def prepared(path: Path, repo: hub.Repo, base: str | None, *, auto_map: bool = False) -> Prepared:
    """The card of a checkpoint that is fit to be published.

    Args:
        path: a quantized folder or file.
        repo: where it is to be published.
        base: the source as ``org/name[@revision]``, where that is known better.
        auto_map: add the Python file through which ``trust_remote_code`` finds kbitq.

    Raises:
        CheckpointError: something is wrong with the checkpoint, or it is no model that such a file can be for.
    """
    instead = _with_auto_map(path) if auto_map else {}
    with console.progress("verifying") as progress:
        problems = checkpoint.verify(path, progress=progress).problems
    if problems:
        raise CheckpointError(
            f"{path} is not published, because something is wrong with it: {problems[0]}",
            hint=f"kbitq verify {shlex.quote(str(path))} lists all of it",
        )
    return Prepared(cards.card_of(path, repository=repo.id, base=base, more=instead), instead)


def publish(
    path: Path, repo: hub.Repo, *, base: str | None, private: bool, pull_request: bool, auto_map: bool = False
) -> hub.Pushed:
    """Upload ``path`` with its card after checking it. Raises as ``prepared`` does, and HubError."""
    card, instead = prepared(path, repo, base, auto_map=auto_map)
    with at_once("run kbitq push again; files that the Hub has are not sent twice"):
        return hub.push(path, repo, card=card, private=private, pull_request=pull_request, instead=instead)


def _with_auto_map(path: Path) -> dict[str, bytes]:
    """config.json that names the Python file, that file, and their checksums. Raises as ``prepared`` does."""
    from kbitq.integrations.transformers.remote_code import FILE, remote_code

    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(f"{path}: only the folder of a model takes --auto-map", hint="leave --auto-map away")
    config = parse_json_object((path / CONFIG_FILE).read_bytes(), f"{path}/{CONFIG_FILE}")
    try:
        text, changed = remote_code(config, auto_class(config) or "")
    except CheckpointError as error:
        raise CheckpointError(f"{path} takes no --auto-map: {error}", hint="leave --auto-map away") from None
    instead = {CONFIG_FILE: f"{json.dumps(changed, indent=2, ensure_ascii=False)}\n".encode(), FILE: text.encode()}
    if (path / SUMS_FILE).is_file():
        changes = {name: sha256(data).hexdigest() for name, data in instead.items()}
        instead[SUMS_FILE] = format_checksums(read_checksums(LocalFolderStorage(path)) | changes)
    return instead
