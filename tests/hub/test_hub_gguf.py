"""GGUF files of the Hub: a repository that is one model, files and sets chosen by name, streamed and downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from helpers.checkpoints import bytes_of
from helpers.fake_hub import FakeHub, HostedRepo
from helpers.gguf_file import f32, finite_blocks, gguf_bytes
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.checkpoint.source.open import open_checkpoint
from kbitq.cli.sources import find
from kbitq.cluster import plan_file
from kbitq.errors import CheckpointError
from kbitq.hub import HubStorage, Repo, download, parse_repo

NAME = "someone/tiny-GGUF"
METADATA = {"general.architecture": "llama", "llama.attention.head_count": 1}
TENSORS = {
    "blk.0.ffn_up.weight": ("Q4_K", (96, 256), finite_blocks("Q4_K", 96).tobytes()),
    "output_norm.weight": f32(np.ones(256)),
}
Q4 = gguf_bytes(METADATA, TENSORS)
Q8 = gguf_bytes(METADATA, {"blk.0.ffn_up.weight": ("Q8_0", (96, 256), finite_blocks("Q8_0", 96 * 8).tobytes())})
SET = {
    "Q8_0/m-00001-of-00002.gguf": gguf_bytes(METADATA, dict(list(TENSORS.items())[:1])),
    "Q8_0/m-00002-of-00002.gguf": gguf_bytes({}, dict(list(TENSORS.items())[1:])),
}
OPTIONS = QuantizeOptions(k=3)


def made(place: object, out: Path) -> dict[str, bytes]:
    return bytes_of(run(plan_quantize(place, out, OPTIONS)).out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b/c.gguf", Repo("a/b", None, "c.gguf")),
        ("a/b/Q8_0/c-00001-of-00002.gguf@v1", Repo("a/b", "v1", "Q8_0/c-00001-of-00002.gguf")),
        ("folder/model.gguf", None),
        ("a/b/../c.gguf", None),
        ("a/b/c.safetensors", None),
        ("a/b/c.gguf/d", None),
    ],
)
def test_a_file_of_a_repository(text: str, expected: Repo | None) -> None:
    assert parse_repo(text) == expected
    assert expected is None or str(expected) == text


def test_a_path_with_a_folder_here_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_repo("org/name/file.gguf") is None
    assert find(Path("org/name/file.gguf")).place == Path("org/name/file.gguf")


def test_a_repository_that_is_one_model(hub: FakeHub, tmp_path: Path) -> None:
    config = json.dumps({"model_type": "mine"}).encode()
    hub.repos[NAME] = HostedRepo({"tiny.gguf": Q4, "config.json": config, "pytorch_model.bin": b"\x80"})
    streamed = made(HubStorage(Repo(NAME)), tmp_path / "streamed")
    assert streamed == made(download(Repo(NAME)), tmp_path / "local")
    assert json.loads(streamed["config.json"])["model_type"] == "mine"
    assert not any("pytorch_model.bin" in request for request in hub.requests)


def test_one_of_several_is_chosen_by_name(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[NAME] = HostedRepo({"tiny-Q4_K.gguf": Q4, "tiny-Q8_0.gguf": Q8, "README.md": b"---\n---\n"})
    for refused in (lambda: HubStorage(Repo(NAME)), lambda: download(Repo(NAME))):
        with pytest.raises(CheckpointError, match=r"several models: tiny-Q4_K\.gguf, tiny-Q8_0\.gguf"):
            refused()
    chosen = Repo(NAME, None, "tiny-Q4_K.gguf")
    streamed = made(HubStorage(chosen), tmp_path / "streamed")
    found = find(Path(str(chosen)))
    assert found.base == f"{NAME}@{HubStorage(chosen).commit}"
    assert streamed == made(found.place, tmp_path / "local")
    assert not any("tiny-Q8_0.gguf" in request for request in hub.requests)
    with pytest.raises(CheckpointError, match="several models"):  # the one in the cache is not the only one
        download(Repo(NAME))


def test_a_set_in_a_folder_of_the_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[NAME] = HostedRepo({"tiny-Q8_0.gguf": Q8, **SET})
    chosen = Repo(NAME, None, "Q8_0/m-00002-of-00002.gguf")
    streamed = made(HubStorage(chosen), tmp_path / "streamed")
    assert streamed == made(download(chosen), tmp_path / "local")
    assert "tiny-Q8_0.gguf" not in "".join(hub.requests)


def test_a_file_that_there_is_not(hub: FakeHub) -> None:
    hub.repos[NAME] = HostedRepo({"tiny.gguf": Q4})
    wrong = Repo(NAME, None, "tiny-Q2.gguf")
    for refused in (lambda: HubStorage(wrong), lambda: download(wrong)):
        with pytest.raises(CheckpointError, match=r"has no file tiny-Q2\.gguf") as error:
            refused()
        assert error.value.hint == "it has tiny.gguf"


def test_what_was_downloaded_is_found_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME] = HostedRepo({"tiny.gguf": Q4, "config.json": b"{}"})
    chosen = Repo(NAME, None, "tiny.gguf")
    before = download(chosen), download(Repo(NAME))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (download(chosen), download(Repo(NAME))) == before


def test_safetensors_come_first(hub: FakeHub, tiny: Repo) -> None:
    hub.repos[tiny.id].files["tiny.gguf"] = Q4
    assert "tiny.gguf" not in HubStorage(tiny).names()
    assert not (download(tiny) / "tiny.gguf").exists()


def test_a_plan_for_many_machines_names_the_file(hub: FakeHub) -> None:
    hub.repos[NAME] = HostedRepo({"tiny-Q4_K.gguf": Q4, "tiny-Q8_0.gguf": Q8})
    opened = open_checkpoint(HubStorage(Repo(NAME, None, "tiny-Q4_K.gguf")))
    again = open_checkpoint(plan_file._source_of(plan_file._source_text(opened.storage)))
    assert list(again.headers) == ["tiny-Q4_K.gguf"] and again.fingerprints == opened.fingerprints
