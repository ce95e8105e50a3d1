"""Where an output may go, what it holds beside tensors, and what it does not depend on."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.checkpoints import bytes_of, model_tensors, partials, write_folder
from kbitq.checkpoint import RunReport
from kbitq.errors import CheckpointError, OutputExistsError

Quantize = Callable[..., RunReport]


def test_output_exists(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    out = tmp_path / "out"
    quantize(folder, out)
    with pytest.raises(OutputExistsError, match="exists"):
        quantize(folder, out, k=4)
    quantize(folder, out, k=4, force=True)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["k"] == 4
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"notes\.txt"):
        quantize(folder, out, k=3, force=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_force_never_replaces_a_folder_that_kbitq_did_not_write(
    folder: Path, tmp_path: Path, quantize: Quantize
) -> None:
    other = tmp_path / "other"
    write_folder(other, model_tensors())  # an original model, whose files an output might have too
    before = bytes_of(other)
    with pytest.raises(OutputExistsError, match="was not written by kbitq"):
        quantize(folder, other, force=True)
    assert bytes_of(other) == before


def test_empty_folder_is_free_to_use(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    (tmp_path / "out").mkdir()
    quantize(folder, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("out", ["tiny", "tiny/out", ".", "file.safetensors"])
def test_refused_outputs(folder: Path, quantize: Quantize, out: str) -> None:
    before = bytes_of(folder)
    with pytest.raises(CheckpointError):
        quantize(folder, folder.parent / out, force=True)
    assert bytes_of(folder) == before


def test_sums_file_names_every_file(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    quantize(folder, tmp_path / "out", max_shard_size=20_000)
    files = bytes_of(tmp_path / "out")
    lines = files.pop("SHA256SUMS").decode().splitlines()
    del files["README.md"]  # the card, which evaluating and publishing change
    assert lines == [f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in files.items()]


def test_nothing_in_an_output_depends_on_where_or_when(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    quantize(folder, tmp_path / "one")
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "renamed"
    folder.rename(moved)
    quantize(moved, tmp_path / "two")
    one, two = bytes_of(tmp_path / "one"), bytes_of(tmp_path / "two")
    card = one.pop("README.md").decode()
    assert card.replace("tiny", "renamed") == two.pop("README.md").decode()  # its command names the source, no path
    assert one == two
    assert partials(tmp_path) == []


def test_one_file_says_what_it_leaves_behind(tmp_path: Path, quantize: Quantize) -> None:
    folder = write_folder(tmp_path / "one", model_tensors())
    assert "config.json and the other files" in quantize(folder, tmp_path / "q.safetensors").notes[0]
    assert quantize(folder, tmp_path / "q").notes == []


def test_an_output_in_place_of_a_file(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        quantize(folder, tmp_path / "file" / "out")
