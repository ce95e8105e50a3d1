"""Quantizing a checkpoint with error feedback: what is written, resumed, refused and said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kbitq.calibration.statistics import Statistics
from kbitq.calibration.writer import Gathered, StatisticsWriter
from kbitq.checkpoint import QuantizeOptions, dequantize_checkpoint, estimation, plan_quantize, run, verify
from kbitq.checkpoint.passes import write_pass
from kbitq.checkpoint.source import memory
from kbitq.codecs import feedback
from kbitq.errors import CalibrationError, SelectionError

NAMES = ("a.q_proj.weight", "a.k_proj.weight")  # these two share an H
OTHER = "a.down_proj.weight"


def hessian(columns: int, seed: int, tokens: int = 500) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=draw) @ torch.randn(columns, columns, generator=draw)
    return x.T @ x


HS = {NAMES: hessian(96, 0), (OTHER,): hessian(160, 1)}


def written(out: Path, parts: list[Gathered]) -> Path:
    with StatisticsWriter(out, {"test": 1}) as writer:
        writer.add(parts)
        writer.finish({"model": "m"}, {"text": "t"}, {"kbitq": "0"}, replace=False)
    return out


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    parts = [Gathered(dict.fromkeys(names), len(h), None, [500], [[h]]) for names, h in HS.items()]
    return written(tmp_path / "stats", parts)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(2)
    shapes = {NAMES[0]: (96, 96), NAMES[1]: (64, 96), OTHER: (96, 160), "b.up_proj.weight": (64, 128)}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    save_file({**tensors, "norm.weight": torch.ones(96)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def quantized(source: Path, name: str, stats: Path | None, **options: Any) -> Path:
    out = source.with_name(name)
    run(plan_quantize(source, out, QuantizeOptions(k=2, calibration=stats, device="cpu", **options)))
    return out


def test_a_gpu_is_timed_with_as_many_rows_as_it_walks_over_at_once(
    source: Path, stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = QuantizeOptions(k=2, calibration=stats, device="cpu")
    plan, bare = (
        plan_quantize(source, source.with_name("x"), o) for o in (options, replace(options, calibration=None))
    )
    assert estimation._rows_of_sample(plan, "cpu") == estimation._rows_of_sample(bare, "cuda") == 512
    weights = 96 * 96 + 64 * 96 + 96 * 160
    assert estimation._rows_of_sample(plan, "cuda") == weights // (96 + 96 + 160)
    monkeypatch.setattr(memory, "FEEDBACK_ELEMENTS_ON_GPU", 32 * 160)  # 53 rows of 96 columns, 32 of 160
    assert estimation._rows_of_sample(plan, "cuda") == weights // (2 * 96 + 2 * 96 + 3 * 160)


def test_a_factor_for_which_memory_is_short_is_made_when_tiles_have_given_theirs_back(
    source: Path, stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantized(source, "whole.safetensors", stats).read_bytes()
    real, short = feedback.factorise, [True, False, True, False, True, True]

    def factorise(*args: Any, **named: Any) -> feedback.Factor:
        if short and short.pop(0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **named)

    monkeypatch.setattr(feedback, "factorise", factorise)
    assert quantized(source, "x.safetensors", stats).read_bytes() == whole  # two factors, each at the second attempt
    with pytest.raises(torch.OutOfMemoryError):
        quantized(source, "y.safetensors", stats)


def losses(source: Path, out: Path) -> dict[str, float]:
    back = out.with_name(out.stem + "-back.safetensors")
    dequantize_checkpoint(out, back)
    found = {}
    with safe_open(source, "pt") as plain, safe_open(back, "pt") as made:
        for names, h in HS.items():
            for name in names:
                found[name] = feedback.proxy_loss(plain.get_tensor(name) - made.get_tensor(name), h)
    return found


@pytest.mark.parametrize("codec", ["planes", "trellis", "trellis/128"])
def test_feedback_lowers_the_loss_of_every_tensor(source: Path, stats: Path, codec: str) -> None:
    with_it = losses(source, out := quantized(source, "with.safetensors", stats, codec=codec))
    without = losses(source, quantized(source, "without.safetensors", None, codec=codec))
    assert all(with_it[name] < 0.9 * without[name] for name in with_it)
    with safe_open(out, "pt") as file:
        said = json.loads(file.metadata()["kbitq"])["tensors"]
    fingerprint = Statistics.open(stats).fingerprint
    assert {n: t.get("calibrated") for n, t in said.items()} == {
        **dict.fromkeys((*NAMES, OTHER), fingerprint), "b.up_proj.weight": None,
    }  # fmt: skip
    report = verify(out, source=source, full=True)
    assert report.problems == []
    assert set(report.not_made_again) == {*NAMES, OTHER}


@pytest.mark.parametrize(("codec", "k"), [("gptq-g32", 4), ("compressed-tensors-g32", 8), ("int8", 8)])
def test_formats_of_integers_take_feedback_too(tmp_path: Path, codec: str, k: int) -> None:
    names = [f"model.layers.{i}.up_proj.weight" for i in range(2)]
    hs = [hessian(96, i) for i in range(2)]
    stats = written(
        tmp_path / "stats", [Gathered({n: None}, 96, None, [500], [[h]]) for n, h in zip(names, hs, strict=True)]
    )
    draw = torch.Generator().manual_seed(2)
    plain = {n: torch.randn((64, 96), generator=draw).bfloat16() for n in names}
    save_file(plain, tmp_path / "model.safetensors")
    found = {}
    for label, calibration in (("with", stats), ("without", None)):
        options = QuantizeOptions(k=k, codec=codec, calibration=calibration, device="cpu")
        run(plan_quantize(tmp_path / "model.safetensors", out := tmp_path / label, options))
        dequantize_checkpoint(out, back := tmp_path / f"{label}-back")
        with safe_open(back / "model.safetensors", "pt") as made:
            found[label] = [
                feedback.proxy_loss(plain[n] - made.get_tensor(n), h) for n, h in zip(names, hs, strict=True)
            ]
    assert all(a < 0.9 * b for a, b in zip(found["with"], found["without"], strict=True))
    report = verify(tmp_path / "with", source=tmp_path / "model.safetensors", full=True)
    assert report.problems == [] and set(report.not_made_again) == set(names)


def test_the_bytes_do_not_depend_on_the_tiles(source: Path, stats: Path) -> None:
    whole = quantized(source, "whole.safetensors", stats)
    pieces = quantized(source, "pieces.safetensors", stats, max_memory=2 << 20)
    assert whole.read_bytes() == pieces.read_bytes()


def test_a_run_that_was_stopped_goes_on(
    source: Path, stats: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = quantized(source, "whole.safetensors", stats)
    seen: list[str] = []
    write_span = write_pass.ShardWriter.write

    def stop(self: Any, *arguments: Any) -> Any:
        seen.append("")
        if len(seen) == 3:
            raise KeyboardInterrupt
        return write_span(self, *arguments)

    monkeypatch.setattr(write_pass.ShardWriter, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        quantized(source, "again.safetensors", stats)
    assert quantized(source, "again.safetensors", stats).read_bytes() == whole.read_bytes()


def test_a_folder_says_what_it_was_made_with(source: Path, stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder"
    run(plan_quantize(source, out, QuantizeOptions(k=3, calibration=stats, device="cpu")))
    report = json.loads((out / "quantization_report.json").read_text())
    fingerprint = Statistics.open(stats).fingerprint
    assert report["calibration"] == fingerprint
    rows = {row["name"]: row.get("calibrated") for row in report["tensors"] if row["verdict"] == "quantized"}
    assert rows == {**dict.fromkeys((*NAMES, OTHER), fingerprint), "b.up_proj.weight": None}
    card = (out / "README.md").read_text()
    assert "--calibration stats" in card and "| Calibration | `stats`, by error feedback |" in card
    assert "The bytes depend on the kind of device" in card and "Every machine" not in card
    assert any("b.up_proj.weight" in note for note in report["files_not_carried"])


def test_experts_have_a_factor_each_and_few_tokens_leave_the_diagonal(tmp_path: Path) -> None:
    hs = [hessian(64, seed) for seed in range(3)]
    name = "m.experts.up_proj"
    parts = [Gathered({name: None}, 64, None, [500, 500, 7], [[h] for h in hs])]
    stats = written(tmp_path / "stats", parts)
    w = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))
    save_file({name: w}, tmp_path / "m.safetensors")
    out = quantized(tmp_path / "m.safetensors", "o.safetensors", stats)
    plain = quantized(tmp_path / "m.safetensors", "p.safetensors", None)
    errors = []
    for file in (out, plain):
        dequantize_checkpoint(file, back := file.with_suffix(".back.safetensors"))
        with safe_open(back, "pt") as made:
            errors.append([feedback.proxy_loss(e, h) for e, h in zip(w - made.get_tensor(name), hs, strict=True)])
    assert errors[0][0] < 0.9 * errors[1][0] and errors[0][1] < 0.9 * errors[1][1]
    assert not torch.equal(torch.tensor(errors[0]), torch.tensor(errors[1]))


def test_more_damping_than_usual_is_said(source: Path, tmp_path: Path) -> None:
    h = hessian(160, 1)
    broken = h - 0.05 * h.diagonal().mean() * torch.eye(160)  # with negative eigenvalues
    broken.diagonal().clamp_(min=1e-6)
    stats = written(tmp_path / "stats", [Gathered({OTHER: None}, 160, None, [500], [[broken]])])
    report = run(plan_quantize(source, tmp_path / "o.safetensors", QuantizeOptions(k=2, calibration=stats)))
    assert any(f"at most 0.1 of the mean, for {OTHER}" in note for note in report.notes)


def test_what_is_refused(source: Path, stats: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError):
        quantized(source, "x.safetensors", tmp_path / "nothing")
    with pytest.raises(SelectionError, match="nothing on any"):
        save_file({"z.weight": torch.randn(64, 128)}, tmp_path / "z.safetensors")
        quantized(tmp_path / "z.safetensors", "x.safetensors", stats)
    with pytest.raises(SelectionError, match="do not go together"):
        save_file({OTHER: torch.ones(160)}, tmp_path / "importance.safetensors")
        quantized(source, "x.safetensors", stats, importance=tmp_path / "importance.safetensors")
    with pytest.raises(SelectionError, match="max_memory"):
        quantized(source, "x.safetensors", stats, max_memory=100_000)
    bad = written(tmp_path / "bad", [Gathered({OTHER: None}, 160, None, [500], [[-hessian(160, 1)]])])
    with pytest.raises(CalibrationError, match=OTHER):
        quantized(source, "x.safetensors", bad)
