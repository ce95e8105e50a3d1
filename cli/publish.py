"""Verify, describe, upload: what ``kbitq push`` and ``kbitq quantize --push`` share."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer

from kbitq import checkpoint, hub
from kbitq.cli import cards
from kbitq.cli.console import console
from kbitq.cli.signals import at_once
from kbitq.errors import CheckpointError


def target(repository: str, revision: str | None = None) -> hub.Repo:
    """The repository to publish to, which may well be the name of a folder here too. A usage error unless org/name."""
    if not re.fullmatch(r"[^/@.~][^/@]*/[^/@]+", repository):
        raise typer.BadParameter(f"{repository!r} is not a repository; write it as org/name.")
    return hub.Repo(repository, revision)


def prepared(path: Path, repo: hub.Repo, base: str | None) -> str:
    """The card of a checkpoint that is fit to be published.

    Args:
        path: a quantized folder or file.
        repo: where it is to be published.
        base: the source as ``org/name[@revision]``, where that is known better.

    Raises:
        CheckpointError: something is wrong with the checkpoint.
    """
    with console.progress("verifying") as progress:
        problems = checkpoint.verify(path, progress=progress).problems
    if problems:
        raise CheckpointError(
            f"{path} is not published, because something is wrong with it: {problems[0]}",
            hint=f"kbitq verify {shlex.quote(str(path))} lists all of it",
        )
    return cards.card_of(path, repository=repo.id, base=base)


def publish(path: Path, repo: hub.Repo, *, base: str | None, private: bool, pull_request: bool) -> hub.Pushed:
    """Upload ``path`` with its card after checking it. Raises as ``prepared`` does, and HubError."""
    card = prepared(path, repo, base)
    with at_once("run kbitq push again; files that the Hub has are not sent twice"):
        return hub.push(path, repo, card=card, private=private, pull_request=pull_request)
