"""A repository of the Hub in the place of a path, with the real client against a local server."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fake_hub import FakeHub, commit_of, hosting
from helpers.program import Kbitq, Result, spawn


@pytest.fixture
def hub(tiny: Path) -> Iterator[FakeHub]:
    """A server that has the repository someone/tiny."""
    with hosting("someone/tiny", tiny) as server:
        yield server


def run_on(hub: FakeHub, folder: Path, *arguments: object) -> Result:
    settings = {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HF_TOKEN": hub.token, "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    return spawn(*arguments, cwd=folder, env={**os.environ, **settings})


@pytest.mark.parametrize("how", [[], ["--stream"]])
def test_a_repository_is_quantized(how: list[str], hub: FakeHub, tmp_path: Path) -> None:
    code, out, err = run_on(hub, tmp_path, "quantize", "someone/tiny@main", "--k", 3, "--json", *how)
    assert (code, err) == (0, "note: there is no path someone/tiny@main here, so it is looked up on the Hub\n")
    assert json.loads(out)["totals"]["quantized"] == 2
    assert (tmp_path / "tiny-kbitq-k3" / "model.safetensors").exists()


def test_what_is_neither_a_path_nor_a_repository(hub: FakeHub, tmp_path: Path) -> None:
    for command in (["quantize", "some/other", "--k", 3], ["inspect", "some/other"], ["plan", "some/other", "--k", 3]):
        code, out, err = run_on(hub, tmp_path, *command)
        assert (code, out) == (1, "")
        assert "no path some/other here" in err
        assert "error: some/other: no such repository" in err
        assert "Traceback" not in err


def test_a_checkpoint_is_published(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    assert run_on(hub, tmp_path, "quantize", tiny, "--k", 3, "--exclude", "*.1.*", "-o", "made", "-q").code == 0
    code, out, err = run_on(hub, tmp_path, "push", "made", "me/made", "--base-model", "someone/tiny@abc", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["url"].endswith("/me/made")
    files = hub.repos["me/made"].files
    assert files["model.safetensors"] == (tmp_path / "made" / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "base_model: someone/tiny" in card
    assert "kbitq quantize someone/tiny@abc --k 3 --exclude '*.1.*'" in card
    code, out, _ = run_on(hub, tmp_path, "verify", "me/made")
    assert (code, out.splitlines()[-1]) == (0, "me/made is as it should be")


def test_the_card_before_anything_is_uploaded(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    assert run_on(hub, tmp_path, "quantize", tiny, "--k", 3, "-o", "made", "-q").code == 0
    given = ["--base-model", "someone/tiny@abc"]
    code, out, err = run_on(hub, tmp_path, "push", "made", "me/made", *given, "--dry-run")
    assert (code, err) == (0, "note: nothing was uploaded; README.md of me/made would be this card\n")
    assert hub.requests == [] and "me/made" not in hub.repos
    assert run_on(hub, tmp_path, "push", "made", "me/made", *given).code == 0
    assert hub.repos["me/made"].files["README.md"].decode() == out
    code, out, err = run_on(hub, tmp_path, "card", "made")
    assert (code, err) == (0, "")
    assert out == (tmp_path / "made" / "README.md").read_text()
    code, out, _ = run_on(hub, tmp_path, "card", "made", "--json", *given)
    assert "base_model: someone/tiny" in json.loads(out)["card"]


def test_quantize_and_publish(hub: FakeHub, tmp_path: Path) -> None:
    code, out, err = run_on(hub, tmp_path, "quantize", "someone/tiny", "--k", 3, "--push", "me/tiny-k3", "--json")
    assert code == 0
    assert json.loads(out)["totals"]["quantized"] == 2
    assert err.splitlines()[-1].startswith("note: published at ")
    card = hub.repos["me/tiny-k3"].files["README.md"].decode()
    assert f"kbitq quantize someone/tiny@{commit_of(hub.repos['someone/tiny'].files)} --k 3" in card
    assert "base_model: someone/tiny\n" in (tmp_path / "tiny-kbitq-k3" / "README.md").read_text()


@pytest.mark.parametrize("how", [[], ["--stream"]])
def test_the_command_in_the_card_fetches_the_same_commit(how: list[str], hub: FakeHub, tmp_path: Path) -> None:
    assert run_on(hub, tmp_path, "quantize", "someone/tiny", "--k", 3, "-o", "first", "-q", *how).code == 0
    line = next(
        x for x in (tmp_path / "first" / "README.md").read_text().splitlines() if x.startswith("kbitq quantize")
    )
    assert run_on(hub, tmp_path, *line.split()[1:], "-o", "again", "-q").code == 0
    for file in (tmp_path / "first").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_damaged_checkpoint_is_not_published(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    assert run_on(hub, tmp_path, "quantize", tiny, "--k", 3, "-o", "made", "-q").code == 0
    shard = tmp_path / "made" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    code, out, err = run_on(hub, tmp_path, "push", "made", "me/made")
    assert (code, out) == (1, "")
    assert "made is not published" in err
    assert "kbitq verify made" in err
    assert "me/made" not in hub.repos


@pytest.mark.parametrize("name", ["made", "me/made/x", "me/made@v1", "./made", ""])
def test_what_is_no_repository(name: str, kbitq: Kbitq, tiny: Path) -> None:
    """Said before anyone is asked."""
    for command in (["push", tiny, name], ["quantize", tiny, "--k", 3, "--push", name]):
        code, out, err = kbitq(*command)
        assert (code, out) == (2, "")
        assert "write it as org/name" in err
