"""Budgets with a calibration: bits are spent by the error of layers' outputs, measured with error feedback."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import bytes_of
from kbitq.calibration.writer import Gathered, StatisticsWriter
from kbitq.checkpoint import Plan, QuantizeOptions, choose, plan_quantize, run
from kbitq.checkpoint.passes import output_errors
from kbitq.checkpoint.passes.output_errors import FeedbackMeter
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.choose.knapsack import Budget
from kbitq.cli.main import run as kbitq
from kbitq.codecs import feedback
from kbitq.codecs.base import Request, get_codec
from kbitq.errors import BudgetError

WIDE, SQUARE, OTHER = "a.down_proj.weight", "a.o_proj.weight", "b.o_proj.weight"
EXPERTS = "m.experts.up_proj"
SHAPES = {WIDE: (96, 160), SQUARE: (128, 96), OTHER: (128, 96), EXPERTS: (3, 32, 64)}


def hessian(columns: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(500, columns, generator=draw) @ torch.randn(columns, columns, generator=draw)
    return x.T @ x


def statistics(out: Path, hs: dict[str, list[torch.Tensor]]) -> Path:
    with StatisticsWriter(out, {"test": 1}) as writer:
        parts = [Gathered({n: None}, len(h[0]), None, [500] * len(h), [[e] for e in h]) for n, h in hs.items()]
        writer.add(parts)
        writer.finish({"model": "m"}, {"text": "t"}, {"kbitq": "0"}, replace=False)
    return out


HS = {WIDE: [hessian(160, 0)], SQUARE: [hessian(96, 1)], EXPERTS: [hessian(64, seed) for seed in (2, 3, 4)]}


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    return statistics(tmp_path / "stats", HS)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


@pytest.fixture
def source(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    save_file({**weights, "norm.weight": torch.ones(96)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def planned(source: Path, out: Path, stats: Path | None, **budget: object) -> Plan:
    options = QuantizeOptions(budget=Budget(**{"bpw": 3.0, **budget}), calibration=stats, device="cpu")
    return plan_quantize(source, out, options)


def meter(source: Path, stats: Path, tmp_path: Path) -> tuple[Plan, FeedbackMeter]:
    plan = planned(source, tmp_path / "unused.safetensors", stats)
    return plan, FeedbackMeter(plan, TileReader(plan.checkpoint), "cpu")


@pytest.mark.parametrize("name", [WIDE, EXPERTS])
def test_the_measure_is_the_loss_that_feedback_leaves(
    source: Path, stats: Path, tmp_path: Path, weights: dict[str, torch.Tensor], name: str
) -> None:
    plan, measuring = meter(source, stats, tmp_path)
    codec, w = get_codec("planes"), weights[name]
    levels = torch.from_numpy(codec.levels("optimal", 3)[0].copy())
    amax = w.abs().max()[None]
    loss = output = noise = 0.0
    for matrix, h in zip(w.reshape(-1, *w.shape[-2:]), HS[name], strict=True):
        parts = feedback.encode(codec, matrix, Request(3, amax, "mse", levels), feedback.factorise(h))
        error = matrix - codec.decode(parts, matrix.shape[1], torch.float32)
        loss, noise = loss + feedback.proxy_loss(error, h), noise + float(error.double().square().sum())
        output += feedback.proxy_loss(matrix, h)
    tensor = next(t for t in plan.tensors if t.name == name)
    found = measuring.measure(tensor, [(("planes", 3), levels)], float(amax))
    assert found.relative(("planes", 3)) == pytest.approx(loss / output, rel=1e-6)
    assert found.noise["planes", 3] == pytest.approx(noise, rel=1e-6)
    assert found.elements == w.numel()


def test_a_sample_of_rows_columns_and_experts_stands_for_all(
    source: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def relative(name: str) -> tuple[float, int]:
        plan, measuring = meter(source, stats, tmp_path)
        levels = torch.from_numpy(get_codec("planes").levels("optimal", 2)[0].copy())
        tensor = next(t for t in plan.tensors if t.name == name)
        found = measuring.measure(tensor, [(("planes", 2), levels)], 4.0)
        return found.relative(("planes", 2)), found.elements

    whole = {name: relative(name)[0] for name in (WIDE, EXPERTS)}
    for limit, value in {"FEW_ELEMENTS": 1, "FEW_ROWS": 16, "COLUMNS": 96, "EXPERTS": 2}.items():
        monkeypatch.setattr(output_errors, limit, value)
    assert relative(WIDE) == (pytest.approx(whole[WIDE], rel=0.4), 16 * 96)
    assert relative(EXPERTS) == (pytest.approx(whole[EXPERTS], rel=0.4), 2 * 16 * 64)


def test_bits_go_where_outputs_suffer(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Two tensors with the same weights: inputs of the one lie in a few directions, so feedback hides its errors."""
    draw = torch.Generator().manual_seed(6)
    few = torch.randn(500, 8, generator=draw) @ torch.randn(8, 96, generator=draw)
    stats = statistics(tmp_path / "s", {SQUARE: [few.T @ few + torch.eye(96)], OTHER: [500 * torch.eye(96)]})
    save_file({SQUARE: weights[SQUARE], OTHER: weights[SQUARE].clone()}, tmp_path / "m.safetensors")
    plan = choose(planned(tmp_path / "m.safetensors", tmp_path / "o.safetensors", stats, bpw=3.75))
    k = {t.name: t.k for t in plan.tensors}
    assert k[SQUARE] < k[OTHER]
    assert plan.choice is not None and plan.choice.error_kind == "outputs"
    assert plan.choice.error <= plan.choice.uniform_error


@pytest.mark.slow
def test_the_folder_says_how_and_its_command_gives_the_same_bytes(
    source: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kbitq(["quantize", str(source), "--bpw", "3", "--calibration", "stats", "-o", "out", "--device", "cpu"]) == 0
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert report["budget"]["weights"] == "outputs" and "error" not in report["options"]
    of_known = 1 - 128 * 96 / sum(torch.Size(shape).numel() for shape in SHAPES.values())  # OTHER has no statistics
    assert report["budget"]["measured_with_feedback"] == pytest.approx(of_known)
    assert report["budget"]["measured_sample"] == 1
    card = (tmp_path / "out" / "README.md").read_text()
    line = next(words for words in card.splitlines() if words.startswith("kbitq quantize"))
    words = [str(source) if word == "SRC" else word for word in shlex.split(line)[1:]]
    (tmp_path / "out").rename(tmp_path / "first")
    assert kbitq([*words, *(["-o", "out"] if "-o" not in words else []), "--device", "cpu"]) == 0
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "first")
    capsys.readouterr()
    assert kbitq(["plan", str(source), "--bpw", "3", "--calibration", "stats", "--device", "cpu"]) == 0
    assert "errors of the outputs, with error feedback" in capsys.readouterr().out


def test_another_error_than_the_usual_one_is_recorded(source: Path, stats: Path, tmp_path: Path) -> None:
    def said(name: str, stats: Path | None, error: str) -> object:
        run(choose(planned(source, tmp_path / name, stats, error=error)))
        return json.loads((tmp_path / name / "quantization_report.json").read_text())["options"].get("error")

    assert said("a", stats, "relative") == "relative"
    assert said("b", stats, "balanced") == "balanced"
    assert said("c", stats, "outputs") is None
    assert said("d", None, "balanced") is None


def test_outputs_need_a_calibration(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="statistics of a calibration"):
        choose(planned(source, tmp_path / "x", None, error="outputs"))
