"""The end of a plan that several machines carry out: `finish` twice, at once, cut short; files removed, a full disk."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import bytes_of, partials
from helpers.plans import Killed, built, do, killed, saved, whole
from kbitq.checkpoint import QuantizeOptions
from kbitq.cluster import Part, finish
from kbitq.errors import CheckpointError, NoSpaceError


def test_finish_says_which_parts_are_missing(folder: Path, tmp_path: Path) -> None:
    plan = saved(folder, tmp_path / "b" / "out", QuantizeOptions(k=3))
    do(plan, Part(0, 4)), do(plan, Part(2, 4))
    with pytest.raises(CheckpointError, match=r"pieces of the phase 'write' are missing, of parts 1/4, 3/4"):
        finish(plan)
    assert not (tmp_path / "b" / "out").exists()
    do(plan, Part(1, 2)), do(plan, Part(0, 2))
    finish(plan)


@pytest.mark.parametrize("step", ["publish_folder", "discard"])
def test_finish_killed_when_it_was_about_to_publish_or_to_tidy_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    options = QuantizeOptions(k=3)
    plan = saved(folder, tmp_path / "b" / "out", options)
    do(plan, Part(0, 1))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(f"kbitq.checkpoint.output.staging.Staging.{step}", killed)
        finish(plan)
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)
    assert partials(tmp_path / "b") == []


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_files_that_are_removed_between_are_not_taken_for_written(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """A new file under the old name has zeros, whatever the journals say."""
    options = QuantizeOptions(k=3, max_shard_size=30_000)
    plan = saved(folder, tmp_path / "b" / "out", options)
    do(plan, Part(0, 2))
    first = min(built(tmp_path / "b" / "out").glob("*.safetensors"))
    damage(first)
    do(plan, Part(1, 2))
    with pytest.raises(CheckpointError, match=r"safetensors was removed or cut short, and the journals beside it say"):
        finish(plan)
    first.unlink(missing_ok=True)
    again = saved(folder, tmp_path / "b" / "out", options)
    assert do(again, Part(0, 1)).reused == 0
    finish(again)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


def test_an_output_is_not_replaced_by_what_journals_of_it_are_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published, not tidied up, and begun again with ``force``: the same plan, whose files are new ones."""
    options = QuantizeOptions(k=3, force=True)
    do(saved(folder, tmp_path / "b" / "out", options), Part(0, 1))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("kbitq.checkpoint.output.staging.Staging.discard", killed)
        finish(tmp_path / "b" / "plan.json")
    plan = saved(folder, tmp_path / "b" / "out", options)
    assert do(plan, Part(0, 1)).reused == 0
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


@pytest.mark.parametrize("force", [False, True])
def test_two_that_finish_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
    """One comes to its end while the other is about to publish: that one has nothing to publish any more."""
    from kbitq.checkpoint.passes import finish as finishing

    options = QuantizeOptions(k=3, force=force)
    plan = saved(folder, tmp_path / "b" / "out", options)
    do(plan, Part(0, 1))
    real, calls = finishing.write_checksums, list[int]()

    def meanwhile(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            finish(plan)
        real(*given)

    monkeypatch.setattr(finishing, "write_checksums", meanwhile)
    with pytest.raises(CheckpointError, match=r"is being finished by another process|cannot be written|appeared while"):
        finish(plan)
    assert len(calls) == 2
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


@pytest.mark.parametrize(("call", "times"), [("pwrite", 1), ("write", 4), ("fdatasync", 4)])
def test_a_full_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, times: int) -> None:
    """A sentence, whatever was being written; when there is room again, the same command goes on."""
    options = QuantizeOptions(k=3)
    plan = saved(folder, tmp_path / "b" / "out", options, chunk_bytes=20_000)
    real, room = getattr(os, call), [times]

    def full(*given: Any) -> Any:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr("kbitq.cluster.commits.SYNC_BYTES", 1)
        patch.setattr(os, call, full)
        with pytest.raises(NoSpaceError, match="no space left to write"):
            do(plan, Part(0, 1))
    assert do(plan, Part(0, 1)).reused
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


def test_what_is_asked_of_a_plan_that_is_finished(folder: Path, tmp_path: Path) -> None:
    plan = saved(folder, tmp_path / "b" / "out", QuantizeOptions(k=3))
    do(plan, Part(0, 1))
    finish(plan)
    for again in (lambda: do(plan, Part(0, 1)), lambda: finish(plan)):
        with pytest.raises(CheckpointError, match="is missing: the plan was finished, or"):
            again()
