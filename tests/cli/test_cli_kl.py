"""``quantize --kl``: the smallest budget whose divergence is small enough, on a tiny language model."""

import json
import re
import shlex
from pathlib import Path

import pytest

from helpers.program import Kbitq

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("more", [[], ["--codec", "auto", "--calibration", "stats"]], ids=["plain", "calibrated"])
def test_the_smallest_budget_gives_the_bytes_of_that_budget(
    language_model: Path, text: Path, tmp_path: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if more:
        given = ["--text", text, "--samples", 4, "--length", 64, "-o", "stats", "--device", "cpu"]
        assert kbitq("calibrate", language_model, *given).code == 0
    given = ["--kl", 0.05, "--text", text, "--window", 64, "--windows", 4, "--device", "cpu", *more]
    code, _, err = kbitq("quantize", language_model, *given, "-o", "found")
    assert code == 0, err
    steps = {float(bits): said for bits, said in re.findall(r"([\d.]+) bits per weight: .*, (enough|too much)\n", err)}
    bits = min(b for b, said in steps.items() if said == "enough")
    assert steps[round(bits - 0.05, 2)] == "too much"
    rows = json.loads((tmp_path / "found" / "quantization_evaluation.json").read_text())["evaluations"]
    assert rows[0]["against"]["kl_mean"] <= 0.05
    command = next(c for c in (tmp_path / "found" / "README.md").read_text().splitlines() if c.startswith("kbitq "))
    assert f"--bpw {bits:g}" in command and "--kl" not in command
    words = shlex.split(command)[2:]
    assert kbitq("quantize", language_model, *words[1:], "-o", "again", "--device", "cpu").code == 0
    weights = ["model.safetensors", "quantization_report.json", "config.json"]
    assert all((tmp_path / "found" / n).read_bytes() == (tmp_path / "again" / n).read_bytes() for n in weights)
    assert {p.name for p in tmp_path.iterdir()} == {"found", "again", "text.txt", *(["stats"] if more else [])}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--kl", 0.05], "--text FILE or --tokens FILE"),
        (["--kl", 0.05, "--text", "text.txt", "--k", 3], "--k and --kl cannot go together"),
        (["--kl", 0.05, "--text", "text.txt", "--bpw", 3], "--bpw and --kl cannot go together"),
        (["--kl", 0.05, "--text", "absent.txt"], "does not exist"),
        (["--kl", 0, "--text", "text.txt"], "above zero"),
        (["--kl", 0.05, "--text", "text.txt", "--dry-run"], "runs the model here"),
        (["--k", 3, "--text", "text.txt"], "are for --kl"),
        (["--kl", 0.05, "--text", "text.txt", "--window", 4096, "--windows", 9], "not enough for 9 windows"),
    ],
)
def test_what_is_refused_before_work_starts(
    language_model: Path, text: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch, given: list[object], said: str
) -> None:
    monkeypatch.chdir(text.parent)
    monkeypatch.setattr("kbitq.checkpoint.allocation.measure_tensor", None)
    code, _, err = kbitq("quantize", language_model, *given, "-o", "out")
    assert code != 0
    assert said in err
    assert [p.name for p in text.parent.iterdir()] == ["text.txt"]


def test_a_divergence_that_no_budget_reaches(language_model: Path, text: Path, kbitq: Kbitq) -> None:
    given = ["--kl", 1e-9, "--text", text, "--window", 64, "--windows", 2, "-o", text.parent / "out"]
    code, _, err = kbitq("quantize", language_model, *given)
    assert code == 1
    assert re.search(r"1e-09 cannot be reached: at 8.25 bits per weight, the most there are, it is [\d.]+", err)
    assert [p.name for p in text.parent.iterdir()] == ["text.txt"]


def test_stopped_in_the_search_nothing_is_left(
    language_model: Path, text: Path, kbitq: Kbitq, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kbitq.cli import evaluating

    seen: list[list[str]] = []

    def stop(*_: object) -> None:
        seen.append([p.name for p in text.parent.iterdir()])
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluating, "evaluated", stop)
    code, _, err = kbitq("quantize", language_model, "--kl", 0.05, "--text", text, "-o", text.parent / "out")
    assert code == 130
    assert "nothing is left of the search" in err
    assert any(name.startswith(".out.kl-") for name in seen[0])
    assert [p.name for p in text.parent.iterdir()] == ["text.txt"]
