"""Publishing to a Hub, with the real client against a local server."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.fake_hub import FakeHub, HostedRepo
from kbitq.checkpoint import QuantizeOptions, inspect, plan_quantize, run
from kbitq.errors import CheckpointError
from kbitq.hub import HubStorage, Repo, download, push
from kbitq.hub.problems import HubError


@pytest.fixture
def quantized(tiny: Repo, tmp_path: Path) -> Path:
    return run(plan_quantize(download(tiny), tmp_path / "tiny-kbitq-k3", QuantizeOptions(k=3))).out


def test_push_uploads_everything_and_the_card_last(hub: FakeHub, quantized: Path) -> None:
    done = push(quantized, Repo("me/tiny"), card="---\nbase_model: someone/tiny\n---\n", private=True)
    hosted = hub.repos["me/tiny"]
    assert hosted.private
    assert done.url.endswith("me/tiny")
    for file in quantized.iterdir():
        if file.name != "README.md":
            assert hosted.files[file.name] == file.read_bytes(), file.name
    assert b"base_model: someone/tiny" in hosted.files["README.md"]


def test_push_opens_a_pull_request(hub: FakeHub, quantized: Path) -> None:
    hub.repos["me/tiny"] = HostedRepo({"README.md": b"mine"})
    done = push(quantized, Repo("me/tiny"), card="new", pull_request=True)
    assert done.pull_request is not None
    assert hub.repos["me/tiny"].files == {"README.md": b"mine"}
    branch = hub.repos["me/tiny"].branches["refs/pr/1"]
    assert branch["README.md"] == b"new"
    assert branch["model.safetensors"] == (quantized / "model.safetensors").read_bytes()


def test_push_to_a_branch(hub: FakeHub, quantized: Path) -> None:
    push(quantized, Repo("me/tiny", "k3"), card="new")
    assert "model.safetensors" not in hub.repos["me/tiny"].files
    assert "model.safetensors" in hub.repos["me/tiny"].branches["k3"]


def test_an_interrupted_push_goes_on(hub: FakeHub, quantized: Path) -> None:
    hub.fail("/commit/", 500, times=50)
    with pytest.raises(CheckpointError, match="fault"):
        push(quantized, Repo("me/tiny"), card="card")
    sent = len([r for r in hub.requests if "lfs-put" in r])
    assert sent
    hub._faults.clear()
    push(quantized, Repo("me/tiny"), card="card")
    assert len([r for r in hub.requests if "lfs-put" in r]) == sent, "a file that the Hub has was sent again"
    assert hub.repos["me/tiny"].files["model.safetensors"] == (quantized / "model.safetensors").read_bytes()


def test_an_upload_that_fails_for_good_is_said(hub: FakeHub, quantized: Path) -> None:
    hub.fail("lfs-put", 500, times=1000)
    with pytest.raises(HubError, match="fault"):
        push(quantized, Repo("me/tiny"), card="card")


@pytest.mark.parametrize(
    "error", [RuntimeError("Error while uploading 'x' to the Hub."), KeyError("sha"), AssertionError(), OSError("cut")]
)
def test_whatever_the_client_raises_is_said(
    hub: FakeHub, quantized: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", failing)
    with pytest.raises(
        HubError, match=f"the Hub's client failed .*{type(error).__name__ if not error.args else error.args[0]}"
    ):
        push(quantized, Repo("me/tiny"), card="card")


def test_push_without_a_token_is_refused(hub: FakeHub, quantized: Path) -> None:
    hub.token = "another"
    with pytest.raises(CheckpointError, match=r"refused|no such repository"):
        push(quantized, Repo("me/tiny"), card="card")


def test_what_was_pushed_can_be_read_back(hub: FakeHub, quantized: Path) -> None:
    push(quantized, Repo("me/tiny"), card="card")
    report = inspect(download(Repo("me/tiny")))
    assert report.totals == inspect(quantized).totals


@pytest.mark.parametrize("token", ["", "  ", "hf_wrong"])
def test_an_empty_or_a_wrong_token(
    token: str, hub: FakeHub, quantized: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError) as caught:
        push(quantized, Repo("me/tiny"), card="card")
    assert "token" in str(caught.value) or "refused" in str(caught.value)
    assert "hf auth login" in (caught.value.hint or "")
    assert "hf_wrong" not in str(caught.value)


@pytest.mark.parametrize("token", ["hf_a b", "hf_\u00e9", "hf_a\nb c", "hf_\udc80", "hf_a\x1b[2J"])
def test_a_malformed_token_is_neither_sent_nor_shown(
    token: str, hub: FakeHub, tiny: Repo, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    before = len(hub.requests)
    for use in (
        lambda: push(quantized, Repo("me/tiny"), card="card"),
        lambda: HubStorage(tiny),
        lambda: download(tiny),
    ):
        with pytest.raises(HubError, match="the token") as caught:
            use()
        assert "hf_" not in f"{caught.value}{caught.value.hint}"
    assert len(hub.requests) == before
