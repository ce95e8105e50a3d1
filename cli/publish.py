"""Verify, describe, upload: what ``kbitq push`` and ``kbitq quantize --push`` share."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from kbitq import __version__, checkpoint, hub
from kbitq.checkpoint.source.side_files import REPORT_FILE
from kbitq.cli.console import console
from kbitq.errors import CheckpointError

_CARD = "README.md"
_MADE_WITH = ("torch", "safetensors")


def target(repository: str, revision: str | None = None) -> hub.Repo:
    """The repository to publish to, which may well be the name of a folder here too. A usage error unless org/name."""
    if not re.fullmatch(r"[^/@.~][^/@]*/[^/@]+", repository):
        raise typer.BadParameter(f"{repository!r} is not a repository; write it as org/name.")
    return hub.Repo(repository, revision)


def publish(path: Path, repo: hub.Repo, *, base: str | None, private: bool, pull_request: bool) -> hub.Pushed:
    """Upload ``path`` after checking it. ``base``: the source as ``org/name[@revision]``, if it is known.

    Raises CheckpointError if something is wrong with the checkpoint, HubError if the Hub does not take it.
    """
    with console.progress("verifying") as progress:
        problems = checkpoint.verify(path, progress=progress).problems
    if problems:
        raise CheckpointError(
            f"{path} is not published, because something is wrong with it: {problems[0]}",
            hint=f"kbitq verify {shlex.quote(str(path))} lists all of it",
        )
    return hub.push(path, repo, card=_card(path, repo, base), private=private, pull_request=pull_request)


def _card(path: Path, repo: hub.Repo, base: str | None) -> str:
    ledger = _ledger(path)
    base_id, _, base_revision = (base or "").partition("@")
    source_card = path / _CARD
    return hub.model_card(
        ledger,
        title=repo.id.rpartition("/")[2],
        repo_id=repo.id,
        base_model=base_id or None,
        base_revision=base_revision or None,
        command=reproduce(ledger.get("options") or _options_of(ledger), base or "SRC"),
        versions={"kbitq": __version__, **{name: metadata.version(name) for name in _MADE_WITH}},
        source_card=source_card.read_text(encoding="utf-8") if source_card.is_file() else None,
    )


def _ledger(path: Path) -> dict[str, Any]:
    """What quantize wrote beside the model; a single file has it in itself."""
    if (path / REPORT_FILE).is_file():
        return json.loads((path / REPORT_FILE).read_text(encoding="utf-8"))
    report = checkpoint.inspect(path)
    return {"totals": report.totals, "tensors": report.tensors}


def _options_of(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a file of one K, scale rule and codebook was made with, as far as its tensors tell."""
    quantized = [row for row in ledger["tensors"] if row["verdict"] == "quantized"]
    found = {key: {row[key] for row in quantized} for key in ("k", "scale", "codebook")}
    return {key: values.pop() for key, values in found.items() if len(values) == 1}


def reproduce(options: Mapping[str, Any], source: str) -> str:
    """The command line that ``options`` (of a ledger) come from; what is the default is left out."""
    words = ["kbitq", "quantize", source]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or (name, value) in _DEFAULTS:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words += [word for item in value if isinstance(item, str) for word in (flag, item)]
        else:
            words += [flag, str(value)]
    return shlex.join(words)


_DEFAULTS = (("scale", "mse"), ("codebook", "optimal"), ("on_nonfinite", "error"), ("keep_embeddings", True))
