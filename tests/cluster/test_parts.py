"""Parts of a plan against a run in one go: the same bytes in any order, in any number, cut short, and done twice."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from helpers.checkpoints import bytes_of, gaussian, model_tensors, partials, write_folder
from helpers.plans import Killed, built, do, saved, whole
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.choose.knapsack import Budget
from kbitq.choose.selection import TensorRule
from kbitq.cluster import Part, finish, work
from kbitq.cluster.attempts import Attempt
from kbitq.errors import CheckpointError, NonFiniteError

OPTIONS = {
    "k": {"k": 3},
    "rules": {"rules": (TensorRule("*q_proj*", k=2), TensorRule("*", k=4, scale="absmax"))},
    "shards": {"k": 5, "max_shard_size": 20_000},
    "fit": {"k": 3, "codebook": "fit"},
    "fit-shared": {"k": 2, "codebook": "fit-shared"},
    "trellis": {"k": 2, "codec": "trellis"},
    "bpw": {"budget": Budget(bpw=3.6)},
    "bpw, fit, two codecs": {"budget": Budget(bpw=3.2), "codebook": "fit", "codec": "planes"},
    "size": {"budget": Budget(size=125_000)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_parts_give_the_bytes_of_one_run(folder: Path, tmp_path: Path, name: str) -> None:
    options = QuantizeOptions(**OPTIONS[name])
    wanted = whole(folder, tmp_path / "a" / "out", options)
    plan = saved(folder, tmp_path / "b" / "out", options)
    for index in (2, 0, 1):
        do(plan, Part(index, 3))
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == wanted
    assert partials(tmp_path / "b") == []


@pytest.mark.parametrize("count", range(1, 8))
def test_any_number_of_parts_in_any_order(folder: Path, tmp_path: Path, count: int) -> None:
    options = QuantizeOptions(k=3)
    plan = saved(folder, tmp_path / "b" / "out", options)
    order = list(range(count))
    Random(count).shuffle(order)
    reports = [do(plan, Part(index, count)) for index in order]
    assert all(r.done for r in reports) or count > 5
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


@contextmanager
def killed_after(lines: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process dies in the middle of the line of its journal that follows ``lines`` others."""
    written = 0
    append = Attempt._append

    def cut(self: Attempt, data: bytes) -> None:
        nonlocal written
        written += data.count(b"\n")
        if written > lines:
            append(self, data[: len(data) // 2])
            raise Killed
        append(self, data)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Attempt, "_append", cut)
        patch.setattr("kbitq.cluster.commits.SYNC_BYTES", 1)  # a line of the journal for each chunk
        yield


@pytest.mark.parametrize("lines", [1, 3, 9, 20, 33])
def test_killed_at_any_line_and_done_again_by_another_number_of_parts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    options = QuantizeOptions(k=3)
    plan = saved(folder, tmp_path / "b" / "out", options)
    with killed_after(lines, monkeypatch):
        do(plan, Part(0, 1))
    with killed_after(2, monkeypatch):
        do(plan, Part(1, 2))
    reports = [do(plan, Part(index, 3)) for index in range(3)]
    assert lines == 1 or any(r.reused for r in reports)
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


def test_two_writers_of_one_part_at_once(folder: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(k=3, codebook="fit")
    plan = saved(folder, tmp_path / "b" / "out", options)
    reports: list[Any] = []
    writers = [Thread(target=lambda: reports.append(work(plan, Part(0, 2), patience=0.2))) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    do(plan, Part(1, 2))
    assert len(reports) == 2
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


def test_a_writer_that_was_thought_dead_goes_on_after_the_part_is_done(folder: Path, tmp_path: Path) -> None:
    """Delivery at least once: every chunk is written twice, by attempts that know nothing of each other."""
    from kbitq.cluster.job import Job
    from kbitq.cluster.worker import run_chunks

    options = QuantizeOptions(k=3)
    plan = saved(folder, tmp_path / "b" / "out", options)
    do(plan, Part(0, 1))
    late = Job(plan)
    late.journals.results, late.journals.places = {}, {}
    late.phase = "write"
    late._begin("write")
    with Attempt(late.file.journals, late.file.hash, "0/1") as attempt:
        assert run_chunks(late, Part(0, 1), attempt) == len(late.chunks)
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


def test_a_matrix_whose_rows_are_longer_than_a_tile(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "wide", {"a.weight": gaussian(5, 70_016, seed=3)})
    options = QuantizeOptions(k=3, max_memory=1 << 20)
    plan = saved(source, tmp_path / "b" / "out", options, chunk_bytes=1)
    for index in range(4):
        do(plan, Part(index, 4))
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(source, tmp_path / "a" / "out", QuantizeOptions(k=3))


def test_machines_with_other_instruction_sets(folder: Path, tmp_path: Path) -> None:
    from kbitq import _C

    options, before = QuantizeOptions(k=3, codebook="fit", device="cpu"), _C.simd()
    plan = saved(folder, tmp_path / "b" / "out", options)
    levels = _C.simd_levels()
    try:
        for index in range(4):
            _C.set_simd(levels[index % len(levels)])
            do(plan, Part(index, 4))
    finally:
        _C.set_simd(before)
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


def test_force_begins_anew(folder: Path, tmp_path: Path) -> None:
    """Over another plan's unfinished output, whose journals count for nothing."""
    do(saved(folder, tmp_path / "b" / "out", QuantizeOptions(k=4)), Part(0, 1))
    options = QuantizeOptions(k=3, force=True)
    plan = saved(folder, tmp_path / "b" / "out", options)
    assert not any((built(tmp_path / "b" / "out") / "model.safetensors").read_bytes())
    assert do(plan, Part(0, 1)).reused == 0
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


def test_one_file(folder: Path, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "one", model_tensors()) / "model.safetensors"
    options = QuantizeOptions(k=4)
    plan = saved(source, tmp_path / "b.safetensors", options)
    do(plan, Part(0, 2)), do(plan, Part(1, 2))
    report = finish(plan)
    single = run(plan_quantize(source, tmp_path / "a.safetensors", options))
    assert report.out.read_bytes() == single.out.read_bytes()
    assert report.totals == single.totals and report.tensors == single.tensors


def test_tensors_that_are_not_finite(tmp_path: Path) -> None:
    """Kept, they change the layout; as an error, every part ends with the sentence of a run in one go."""
    tensors = model_tensors()
    tensors["model.layers.0.mlp.down_proj.weight"][3, 7] = float("nan")
    source = write_folder(tmp_path / "nan", tensors, shards=2)
    options = QuantizeOptions(k=3, on_nonfinite="keep", max_shard_size=30_000)
    plan = saved(source, tmp_path / "b" / "out", options)
    do(plan, Part(1, 2)), do(plan, Part(0, 2))
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(source, tmp_path / "a" / "out", options)

    with pytest.raises(NonFiniteError) as single:
        whole(source, tmp_path / "c", QuantizeOptions(k=3))
    plan = saved(source, tmp_path / "d", QuantizeOptions(k=3))
    for index in range(2):
        with pytest.raises(NonFiniteError) as found:
            do(plan, Part(index, 2))
        assert str(found.value) == str(single.value)


def test_importance_and_error_feedback(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"model.layers.0.self_attn.q_proj.weight": torch.rand(64) + 0.1}, tmp_path / "importance.safetensors")
    options = QuantizeOptions(k=3, importance=tmp_path / "importance.safetensors", budget=None)
    plan = saved(folder, tmp_path / "b" / "out", options)
    do(plan, Part(0, 2)), do(plan, Part(1, 2))
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == whole(folder, tmp_path / "a" / "out", options)


def test_a_plan_is_saved_again_and_goes_on(folder: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(k=3)
    first = saved(folder, tmp_path / "b" / "out", options)
    done = do(first, Part(0, 1))
    again = saved(folder, tmp_path / "b" / "out", options)
    assert json.loads(again.read_text()) == json.loads(first.read_text())
    report = do(again, Part(0, 1))
    assert report.done == 0 < report.reused < done.done
    with pytest.raises(CheckpointError, match="unfinished output of another run: plan file was"):
        saved(folder, tmp_path / "b" / "out", QuantizeOptions(k=4))
    with pytest.raises(CheckpointError, match="unfinished output of another run: plan file was"):
        run(plan_quantize(folder, tmp_path / "b" / "out", options))
    finish(again)


def test_a_worker_waits_for_others_that_give_a_sign(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells what it waits for, and takes over only when the sign stays out."""
    plan = saved(folder, tmp_path / "b" / "out", QuantizeOptions(k=3))
    monkeypatch.setattr("kbitq.cluster.worker._FIRST_WORD_SECONDS", 0.0)
    said: list[str] = []
    report = work(plan, Part(0, 2), patience=0.2, say=said.append)
    assert report.taken_over and "waiting for other parts: " in said[0] and "of the phase 'scan'" in said[0]
    assert said[-1].startswith("no other part gives a sign: doing its ")
    said.clear()
    assert work(plan, Part(1, 2), patience=60.0, say=said.append).taken_over == 0 and said == []


def test_no_byte_of_a_page_shared_with_another_part_is_written_by_a_worker(folder: Path, tmp_path: Path) -> None:
    """What lies on a page with another's bytes waits in the journal until the file is sealed."""
    out = tmp_path / "b" / "out"
    plan = saved(folder, out, QuantizeOptions(k=3))
    do(plan, Part(1, 2))
    before = np.fromfile(built(out) / "model.safetensors", np.uint8)
    do(plan, Part(0, 2))
    finish(plan)
    after = np.fromfile(out / "model.safetensors", np.uint8)
    differing = {int(p) for p in np.flatnonzero(before != after) // 4096}
    assert len(differing) < -(-len(after) // 4096)
    assert all(not before[p * 4096 : (p + 1) * 4096].any() for p in differing)  # such pages were not touched at all
