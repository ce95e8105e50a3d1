"""Files of an output are sealed while others are written, by whoever writes last; pages that chunks fill together."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from helpers.checkpoints import bytes_of
from helpers.plans import Killed, built, do, killed, saved, whole
from kbitq.checkpoint import QuantizeOptions
from kbitq.checkpoint.passes.journal_lines import parsed_line
from kbitq.cluster import Part, finish
from kbitq.cluster.chunks import ChunkKey
from kbitq.cluster.job import Job
from kbitq.cluster.pages import PageWriter, SharedFile
from kbitq.cluster.ray_tasks import do_part
from kbitq.errors import CheckpointError

ONE, MANY = QuantizeOptions(k=3), QuantizeOptions(k=3, max_shard_size=20_000)


def lines(out: Path) -> list[dict[str, Any]]:
    """The records of all journals, those of one after those of another."""
    paths = sorted((built(out).parent / "parts").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [record for path in paths for line in path.read_bytes().splitlines(True) if (record := parsed_line(line))]


def nothing_is_left_to_seal(monkeypatch: pytest.MonkeyPatch, plan: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kbitq.cluster.sealing.Sealer.begin", killed)
        finish(plan)


@pytest.mark.parametrize("options", [ONE, MANY])
def test_files_are_sealed_as_they_are_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: QuantizeOptions
) -> None:
    """A line about a sum follows the lines about all that was summed, and those of files that come first come early."""
    out = tmp_path / "b" / "out"
    monkeypatch.setattr("kbitq.cluster.commits.SYNC_BYTES", 1)
    plan = saved(folder, out, options)
    do(plan, Part())
    shards = {s.name: {*s.meta.tensors, *s.meta.kept} for s in Job(plan).plan.shards if s.meta is not None}
    found = lines(out)
    at = {r["of"]: i for i, r in enumerate(found) if r["is"] == "seal"}
    last = {name: max(i for i, r in enumerate(found) if r.get("of") in shards[name]) for name in shards}
    assert at.keys() == shards.keys() and all(at[name] > last[name] for name in shards)
    assert options is ONE or min(at.values()) < max(last.values())
    nothing_is_left_to_seal(monkeypatch, plan)
    assert bytes_of(out) == whole(folder, tmp_path / "a" / "out", options)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_whoever_writes_last_seals(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    """A file that three parts have a share of, in any order; what they have on pages of others comes from journals."""
    out = tmp_path / "b" / "out"
    plan = saved(folder, out, ONE)
    for index in order:
        assert not any(record["is"] == "seal" for record in lines(out))
        do(plan, Part(index, 3))
    nothing_is_left_to_seal(monkeypatch, plan)
    assert bytes_of(out) == whole(folder, tmp_path / "a" / "out", ONE)


@pytest.mark.parametrize("options", [ONE, MANY])
@pytest.mark.parametrize("what", ["kbitq.cluster.sealing.sha256", "kbitq.cluster.sealing.Sealer.note_finished"])
def test_killed_while_files_are_summed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: QuantizeOptions, what: str
) -> None:
    """No sum is noted; what was written and not noted is written again, by another number of parts."""
    out = tmp_path / "b" / "out"
    plan = saved(folder, out, options)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(what, killed)
        do(plan, Part())
    assert not any(record["is"] == "seal" for record in lines(out))
    do(plan, Part(1, 2)), do(plan, Part(0, 2))
    finish(plan)
    assert bytes_of(out) == whole(folder, tmp_path / "a" / "out", options)


def test_a_disk_that_fails_leaves_no_sum(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes were read back from memory for their sum, and are not on the disk."""
    out = tmp_path / "b" / "out"
    plan = saved(folder, out, ONE)
    do_part(str(plan), "scan", 0, 1, "cpu")

    def broken(file: SharedFile) -> None:
        raise CheckpointError(f"{file.path} cannot be written: Input/output error")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="Input/output error"):
        patch.setattr(SharedFile, "sync", broken)
        do(plan, Part())
    assert {record["is"] for record in lines(out)} == {"attempt", "at", "scan"}
    do(plan, Part())
    finish(plan)
    assert bytes_of(out) == whole(folder, tmp_path / "a" / "out", ONE)


@pytest.mark.parametrize("threads", [3, 16])
def test_files_are_sealed_side_by_side_where_tasks_do_not(folder: Path, tmp_path: Path, threads: int) -> None:
    """One of several tasks of a cluster leaves files to the phase after it; with more threads than files, and fewer."""
    out, before = tmp_path / "b" / "out", torch.get_num_threads()
    plan = saved(folder, out, MANY)
    for phase in ("scan", "write"):
        assert do_part(str(plan), phase, 0, 2, "cpu") == do_part(str(plan), phase, 1, 2, "cpu") == {}
    assert not any(record["is"] == "seal" for record in lines(out))
    try:
        torch.set_num_threads(threads)
        finish(plan)
    finally:
        torch.set_num_threads(before)
    assert bytes_of(out) == whole(folder, tmp_path / "a" / "out", MANY)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_a_sealed_file_that_is_removed_is_not_published(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    out = tmp_path / "b" / "out"
    plan = saved(folder, out, MANY)
    do(plan, Part())
    damage(max(built(out).glob("*.safetensors")))
    with pytest.raises(CheckpointError, match=r"safetensors was removed or cut short, and the journals beside it say"):
        finish(plan)
    assert not out.exists()


@pytest.mark.parametrize("seed", range(5))
def test_pages_that_chunks_fill_together(tmp_path: Path, seed: int) -> None:
    """Chunks of several pieces in any order and commits between any two of them: what was written and what is left are
    the bytes, and a page is written whole or not at all."""
    chance, page, size = Random(seed), 4096, 20 * 4096 + 77
    wanted = chance.randbytes(size)
    cuts = sorted({0, size, *(chance.randrange(size) for _ in range(30))})
    pieces = list(pairwise(cuts))
    chance.shuffle(pieces)
    file = SharedFile(tmp_path / "file", size)
    found, left, commits = bytearray(size), 0, 0
    pages = PageWriter(file, page)
    for number in range(0, len(pieces), 3):
        chunk = ChunkKey("write", str(number), 0, 1)
        for start, stop in pieces[number : number + 3]:
            pages.write(start, wanted[start:stop], chunk)
        if chance.random() < 0.3 or number + 3 >= len(pieces):
            commits += 1
            for owner, edges in pages.take_edges().items():
                mine = {i for piece in pieces[int(owner.name) :][:3] for i in range(*piece)}
                for offset, data in edges:
                    assert mine.issuperset(range(offset, offset + len(data)))
                    found[offset : offset + len(data)] = data
                    left += len(data)
    file.close()
    on_disk = (tmp_path / "file").read_bytes()
    for start in range(0, size, page):
        here = slice(start, start + page)
        assert on_disk[here] in (wanted[here], bytes(len(wanted[here])))
        if any(on_disk[here]):
            assert not any(found[here])
            found[here] = on_disk[here]
    assert found == wanted and commits > 1 and left < size
