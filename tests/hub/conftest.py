"""A fake Hub, and the real client pointed at it over plain HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.fake_hub import FakeHub, tiny_repo

if TYPE_CHECKING:
    from kbitq.hub import Repo

# huggingface_hub reads its settings when it is first imported: the endpoint is patched per test below.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """A running ``FakeHub``; the client in this process speaks to it, with a valid token and an empty cache."""
    import huggingface_hub
    from huggingface_hub import constants

    fake = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", fake.token)
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda _seconds: None)
    yield fake
    fake.close()


@pytest.fixture
def tiny(hub: FakeHub) -> Repo:
    """A repository with two quantizable weights."""
    from kbitq.hub import Repo

    hub.repos["someone/tiny"] = tiny_repo()
    return Repo("someone/tiny")
