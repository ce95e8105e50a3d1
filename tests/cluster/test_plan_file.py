"""Files of plans that must be refused: changed, of another version, for another source, leading elsewhere."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kbitq.checkpoint import QuantizeOptions, plan_quantize
from kbitq.cluster import Part, finish, parse_part, part_of_environment, save_plan, work
from kbitq.cluster.attempts import Journals
from kbitq.cluster.plan_file import open_plan
from kbitq.errors import CheckpointError, OptionError, OutputExistsError, SourceChangedError


@pytest.fixture
def plan(folder: Path, tmp_path: Path) -> Path:
    planned = plan_quantize(folder, tmp_path / "out", QuantizeOptions(k=3))
    return save_plan(planned, tmp_path / "plan.json", chunk_bytes=5000).path


def rewrite(plan: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """What a stranger may do: change the plan, and give it the right hash again."""
    content = json.loads(plan.read_text())
    change(content)
    del content["hash"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    plan.write_text(json.dumps({**content, "hash": hashlib.sha256(text.encode()).hexdigest()}))


def test_the_hash_is_over_everything(plan: Path) -> None:
    text = plan.read_text()
    content = json.loads(text)
    for key in content.keys() - {"kbitq_plan"}:
        plan.write_text(json.dumps({**content, key: "0" * 64}))
        with pytest.raises(CheckpointError, match="its hash is not that of its content"):
            work(plan, Part(), patience=0)
    plan.write_text(text[:-40])
    with pytest.raises(CheckpointError):
        work(plan, Part(), patience=0)


@pytest.mark.parametrize("change, sentence", [
    ({"kbitq": "0.0.9"}, "made by kbitq 0.0.9, and this is kbitq"),
    ({"format_version": 99}, "all machines need the same version"),
    ({"code": "0" * 16}, "another build of kbitq"),
    ({"kbitq_plan": 2}, "is not a plan of kbitq plan that this version reads"),
    ({"layout": "0" * 16}, "the same options make another plan here"),
    ({"inputs": "0" * 64}, "the same options make another plan here"),
    ({"out": "relative/out"}, "is not a place to write to"),
    ({"out": "/"}, "is not a place to write to"),
    ({"out": "/tmp/x/../../etc/out"}, "is not a place to write to"),
    ({"page": 1}, "is not a place to write to"),
    ({"chunk_bytes": 0}, "is not a place to write to"),
    ({"chunk_bytes": 1e999}, "its options make no sense"),
    ({"page": {}}, "its options make no sense"),
    ({"out": "/tmp/a\0b"}, "is missing: the plan was finished, or"),
    ({"source": 3}, "its options make no sense"),
    ({"source": "/tmp/a\0b"}, "."),
    ({"source_files": [1]}, "is not the file that"),
    ({"options": {"k": 3}}, "its options make no sense"),
    ({"options": None}, "its options make no sense"),
    ({"source": "/nowhere/at/all"}, "does not exist"),
    ({"source": "hub:../../etc"}, "names no repository"),
])  # fmt: skip
def test_a_plan_with_a_right_hash_is_checked_all_the_same(plan: Path, change: dict[str, Any], sentence: str) -> None:
    rewrite(plan, lambda content: content.update(change))
    with pytest.raises(CheckpointError, match=sentence):
        work(plan, Part(), patience=0)


def test_names_of_files_in_a_plan_are_not_used(plan: Path, tmp_path: Path) -> None:
    """Where bytes go is made from the source's headers; what the file says of it is for readers."""

    def elsewhere(content: dict[str, Any]) -> None:
        content["files"][0]["name"] = "../../stolen.safetensors"

    rewrite(plan, elsewhere)
    work(plan, Part(), patience=0)
    finish(plan)
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == ["model.safetensors"]
    assert not list(tmp_path.rglob("stolen*"))


def test_an_output_that_is_somebody_elses_is_not_replaced(plan: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "letter.txt").write_text("mine")
    save_plan(plan_quantize(tmp_path / "tiny", tmp_path / "out2", QuantizeOptions(k=3)), tmp_path / "plan2.json")
    work(tmp_path / "plan2.json", Part(), patience=0)
    (tmp_path / "out2").mkdir()
    (tmp_path / "out2" / "letter.txt").write_text("mine")
    with pytest.raises(OutputExistsError):
        finish(tmp_path / "plan2.json")
    rewrite(plan, lambda content: content.update(out=str(theirs)))
    with pytest.raises(CheckpointError):
        work(plan, Part(), patience=0)
    assert (theirs / "letter.txt").read_text() == "mine"


def test_a_source_of_the_same_shape_with_other_values_is_refused(plan: Path, folder: Path) -> None:
    """Two finetunes of a model have the same headers; times of files say nothing on another machine."""
    (shard := folder / "model-00001-of-00002.safetensors").touch()
    open_plan(plan)
    tensors = load_file(shard)
    tensors["model.embed_tokens.weight"] += 1
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(SourceChangedError, match=r"model-00001-of-00002\.safetensors is not the file that"):
        work(plan, Part(), patience=0)


def test_a_missing_hidden_folder_is_said(plan: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.kbitq-partial").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="does not share that disk"):
        work(plan, Part(), patience=0)


def lines_of(folder: Path) -> list[bytes]:
    (journal,) = folder.glob("*.jsonl")
    return journal.read_bytes().splitlines(keepends=True)


def test_journals_that_are_damaged_or_forged_are_passed_over(plan: Path, tmp_path: Path) -> None:
    from kbitq.checkpoint.passes.journal_lines import format_line

    work(plan, Part(0, 2), patience=0)
    folder = tmp_path / ".out.kbitq-partial" / "parts"
    whole, hash_ = lines_of(folder), json.loads(plan.read_text())["hash"]
    found = Journals(folder, hash_)
    found.update()
    known = len(found.results) + len(found.places)
    (folder / "0.jsonl").write_bytes(b"\xff" * 100)
    (folder / "1.jsonl").write_bytes(whole[0] + whole[1][:-3])
    (folder / "2.jsonl").write_bytes(
        format_line({"is": "attempt", "plan": "another", "part": "0/1", "host": "h", "node": "", "pid": 1})
    )
    (folder / "3.jsonl").write_bytes(whole[0] + format_line({"is": "write", "of": 3}))
    (folder / "4.jsonl").mkdir()
    again = Journals(folder, hash_)
    again.update()
    assert len(again.results) + len(again.places) == known
    work(plan, Part(1, 2), patience=0)
    finish(plan)


def test_a_forged_result_is_refused(plan: Path, tmp_path: Path) -> None:
    from kbitq.checkpoint.passes.journal_lines import format_line
    from kbitq.cluster.job import Job

    job = Job(plan)
    chunk = job.chunks[0]
    head = {"is": "attempt", "plan": job.file.hash, "part": "0/1", "host": "h", "node": "", "pid": 1}
    line = {"is": chunk.phase, "of": chunk.name, "from": chunk.start, "to": chunk.stop, "layout": job.layout}
    journal = tmp_path / ".out.kbitq-partial" / "parts" / "forged.jsonl"
    for result in (None, ["nan", 0, -1], ["zz", 0, -1], [1], {"a": 1}):
        journal.write_bytes(format_line(head) + format_line({**line, "result": result}))
        with pytest.raises(CheckpointError, match="a result of scan that makes no sense"):
            work(plan, Part(), patience=0)


def test_edges_outside_of_the_data_are_refused() -> None:
    from kbitq.cluster.results import edges_json, edges_of

    assert list(edges_of({"edges": edges_json([(100, b"ab")])}, 100, 102)) == [(100, b"ab")]
    for offset in (99, 101):
        with pytest.raises(CheckpointError):
            list(edges_of({"edges": edges_json([(offset, b"ab")])}, 100, 102))


def test_parts_of_the_environment() -> None:
    assert part_of_environment({}) is None
    assert part_of_environment({"RANK": "1", "WORLD_SIZE": "4"}) == Part(1, 4)
    slurm = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1"}
    assert part_of_environment(slurm) == Part(2, 4)
    odd = {"SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "0"}
    assert part_of_environment({**odd, "SLURM_ARRAY_TASK_STEP": "2"}) == Part(3, 4)
    with pytest.raises(OptionError, match="there is no part 6/4"):
        part_of_environment(odd)
    assert parse_part("3/4") == Part(3, 4)
    for wrong in ("4/4", "1", "a/b", "-1/2", "1/0", ""):
        with pytest.raises(OptionError):
            parse_part(wrong)
    with pytest.raises(OptionError, match="are no numbers"):
        part_of_environment({"RANK": "x", "WORLD_SIZE": "4"})


def test_every_chunk_is_of_one_part() -> None:
    from kbitq.cluster.chunks import Chunk

    sizes = torch.randint(0, 1000, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    chunks = [Chunk("scan", str(i), 0, 1, size << 10) for i, size in enumerate(sizes)]
    for count in (1, 2, 3, 7, 50, 200):
        dealt = [c for i in range(count) for c in Part(i, count).of(chunks)]
        assert dealt == chunks
    shares = [sum(c.nbytes for c in Part(i, 4).of(chunks)) for i in range(4)]
    assert max(shares) - min(shares) <= 2 * max(sizes) << 10


def test_a_source_that_changes_while_it_is_read_leaves_no_line(
    plan: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kbitq.cluster.chunk_work import _Filling

    real = _Filling.write

    def changed_meanwhile(self: _Filling, *given: Any) -> None:
        real(self, *given)
        (folder / "model-00001-of-00002.safetensors").touch()

    monkeypatch.setattr(_Filling, "write", changed_meanwhile)
    with pytest.raises(SourceChangedError):
        work(plan, Part(), patience=0)
    assert not any(b'"is":"write"' in line for line in lines_of(tmp_path / ".out.kbitq-partial" / "parts"))
