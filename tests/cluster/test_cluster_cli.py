"""``kbitq plan --save``, ``work`` and ``finish`` as they are typed."""

import json
from pathlib import Path

import pytest

from helpers.program import Kbitq


def test_a_plan_its_parts_and_its_end(tiny: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out.safetensors"
    saved = kbitq("plan", tiny, "--k", 3, "-o", out, "--save", plan)
    assert (saved.code, saved.out) == (0, f"{plan}\n")
    assert f"kbitq work {plan} --part I/N" in saved.err
    unfinished = kbitq("finish", plan)
    assert unfinished.code == 1 and f"hint: kbitq work {plan} --part I/N" in unfinished.err
    first = kbitq("work", plan, "--part", "0/2", "--patience", 0)
    assert first.code == 0 and "part 0/2 is complete" in first.err
    second = kbitq("work", plan, "--part", "1/2", "--patience", 0, "--json")
    assert second.code == 0 and json.loads(second.out)["part"] == "1/2"
    done = kbitq("finish", plan, "--quiet")
    assert (done.code, done.out) == (0, f"{out}\n")
    single = tmp_path / "single.safetensors"
    assert kbitq("quantize", tiny, "--k", 3, "-o", single, "--quiet").code == 0
    assert out.read_bytes() == single.read_bytes()


def test_the_part_of_the_environment(tiny: Path, tmp_path: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tmp_path / "plan.json"
    kbitq("plan", tiny, "--k", 3, "-o", tmp_path / "out.safetensors", "--save", plan)
    missing = kbitq("work", plan)
    assert missing.code == 2 and "Missing option '--part'" in missing.err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "part 0/1 is complete" in kbitq("work", plan).err


@pytest.mark.parametrize("part", ["2/2", "x", "0"])
def test_parts_that_there_are_not(tiny: Path, tmp_path: Path, kbitq: Kbitq, part: str) -> None:
    plan = tmp_path / "plan.json"
    kbitq("plan", tiny, "--k", 3, "-o", tmp_path / "out.safetensors", "--save", plan)
    wrong = kbitq("work", plan, "--part", part)
    assert wrong.code == 1 and "part" in wrong.err and "internal" not in wrong.err


def test_saving_never_touches_what_is_there(tiny: Path, tmp_path: Path, kbitq: Kbitq) -> None:
    out, other = tmp_path / "out.safetensors", tmp_path / "other.json"
    other.write_text("mine")
    before = tiny.read_bytes()
    for place in (tiny, other, out):
        assert kbitq("plan", tiny, "--k", 3, "-o", out, "--save", place).code == 1
    assert tiny.read_bytes() == before and other.read_text() == "mine"
    recipe = kbitq("plan", tiny, "--bpw", 3.5, "-o", out, "--save", "p.json", "--write-recipe", tmp_path / "r.toml")
    assert recipe.code == 2 and "--write-recipe needs the K that a budget chooses" in recipe.err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--workers", 2), "--workers needs --cluster"),
        (("--gpus-per-worker", 1), "--gpus-per-worker needs --cluster"),
        (("--cluster", "auto", "--device", "cuda"), "--gpus-per-worker says how many GPUs a worker has, not --device"),
    ],
)
def test_options_of_machines_that_say_nothing(
    tiny: Path, tmp_path: Path, kbitq: Kbitq, given: tuple[object, ...], says: str
) -> None:
    ended = kbitq("quantize", tiny, "--k", 3, "-o", tmp_path / "out.safetensors", *given)
    assert ended.code == 2 and says in " ".join(ended.err.split()), ended.err
    assert list(tmp_path.iterdir()) == [tiny]
