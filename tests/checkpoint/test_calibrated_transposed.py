"""Quantizing weights that are stored [in, out] with error feedback down their rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kbitq.calibration.writer import Gathered, StatisticsWriter
from kbitq.checkpoint import (
    QuantizeOptions,
    choose,
    dequantize_checkpoint,
    estimation,
    plan_quantize,
    quantization,
    run,
    verify,
)
from kbitq.checkpoint.passes import write_pass
from kbitq.checkpoint.passes.device_pipeline import DevicePipeline
from kbitq.checkpoint.passes.output_errors import FeedbackMeter
from kbitq.checkpoint.source.memory import factor_bytes
from kbitq.checkpoint.source.storage import LocalFileStorage
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.choose.knapsack import Budget
from kbitq.cluster.chunks import chunks_of
from kbitq.codecs import feedback
from kbitq.codecs.base import Request, get_codec
from kbitq.errors import SelectionError
from kbitq.on_the_fly.decisions import Decisions

MATRIX, EXPERTS = "h.0.mlp.c_fc.weight", "h.0.experts.gate_up_proj"
SHAPES = {MATRIX: (96, 160), EXPERTS: (3, 64, 96)}


def hessian(inputs: int, seed: int, tokens: int = 500) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw)
    return x.T @ x


HS = {MATRIX: [hessian(96, 0)], EXPERTS: [hessian(64, seed) for seed in (1, 2, 3)]}


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stats") / "stats"
    tokens = {MATRIX: [500], EXPERTS: [500, 500, 63]}  # the last expert saw one too few
    with StatisticsWriter(out, {"test": 1}) as writer:
        writer.add([Gathered({n: None}, len(hs[0]), None, tokens[n], [[h] for h in hs], True) for n, hs in HS.items()])
        writer.finish({"model": "m"}, {"text": "t"}, {"kbitq": "0"}, replace=False)
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = torch.Generator().manual_seed(2)
    path = tmp_path_factory.mktemp("source") / "model.safetensors"
    save_file({name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}, path)
    return path


def quantized(source: Path, out: Path, stats: Path | None, **options: Any) -> Path:
    run(plan_quantize(source, out, QuantizeOptions(k=2, calibration=stats, device="cpu", **options)))
    return out


def losses(source: Path, out: Path) -> list[float]:
    back = out.with_name(out.stem + "-back.safetensors")
    dequantize_checkpoint(out, back)
    with safe_open(source, "pt") as plain, safe_open(back, "pt") as made:
        errors = {n: (plain.get_tensor(n) - made.get_tensor(n)).reshape(-1, *SHAPES[n][-2:]) for n in SHAPES}
    return [feedback.proxy_loss(e, h, transposed=True) for n in SHAPES for e, h in zip(errors[n], HS[n], strict=True)]


@pytest.mark.parametrize("codec", ["planes", "trellis", "trellis/128"])
def test_feedback_lowers_the_loss_where_there_were_tokens_enough(
    source: Path, stats: Path, tmp_path: Path, codec: str
) -> None:
    out = quantized(source, tmp_path / "with.safetensors", stats, codec=codec)
    matrix, first, second, scarce = losses(source, out)
    bare = losses(source, quantized(source, tmp_path / "without.safetensors", None, codec=codec))
    assert matrix < 0.9 * bare[0] and first < 0.9 * bare[1] and second < 0.9 * bare[2]
    assert scarce == pytest.approx(bare[3], rel=1e-6)
    report = verify(out, source=source, full=True)
    assert (report.problems, set(report.not_made_again)) == ([], set(SHAPES))


def test_what_the_plan_and_the_ledger_say(source: Path, stats: Path, tmp_path: Path) -> None:
    plan = plan_quantize(source, tmp_path / "out", QuantizeOptions(k=2, calibration=stats, device="cpu"))
    said = "fewer tokens than columns for these, so only the diagonal of H counts and no error is fed back: "
    assert any(note.endswith(f"{said}{EXPERTS} (1 of 3 experts)") for note in plan.notes)
    whole = factor_bytes(96) + 40 * 96 * 160
    assert plan.feedback_bytes(0) == plan.feedback_bytes(None) == whole
    bare = plan_quantize(source, tmp_path / "bare", QuantizeOptions(k=2, device="cpu"))
    assert plan.peak_memory == bare.peak_memory + whole
    assert estimation.estimate(plan, 0).seconds > 0
    assert estimation._factor_seconds(plan) > estimation._factor_seconds(bare) == 0
    run(plan)
    report = json.loads((tmp_path / "out/quantization_report.json").read_text())
    assert any(said in note for note in report["files_not_carried"])


def test_a_matrix_that_does_not_fit_is_refused_with_the_number(source: Path, stats: Path, tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match=r"takes at least 1 MB for the widest tensor, more than max_memory"):
        quantized(source, tmp_path / "x.safetensors", stats, max_memory=900_000)


def test_the_bytes_do_not_depend_on_memory_nor_on_being_stopped(
    source: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantized(source, tmp_path / "whole.safetensors", stats).read_bytes()
    assert quantized(source, tmp_path / "small.safetensors", stats, max_memory=1_000_000).read_bytes() == whole
    seen, write_span = [], write_pass.ShardWriter.write

    def stop(self: Any, *arguments: Any) -> Any:
        seen.append("")
        if len(seen) == 3:  # in the middle of the experts
            raise KeyboardInterrupt
        return write_span(self, *arguments)

    monkeypatch.setattr(write_pass.ShardWriter, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        quantized(source, tmp_path / "again.safetensors", stats)
    assert quantized(source, tmp_path / "again.safetensors", stats).read_bytes() == whole


def test_a_tile_is_never_cut_into_strips(
    source: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline of GPUs, on the CPU."""
    whole = quantized(source, tmp_path / "cpu.safetensors", stats).read_bytes()
    made = []

    def pipeline(reader: Any) -> DevicePipeline:
        made.append(DevicePipeline(reader, ["cpu"]))
        made[0]._work._strips._strip_bytes = 4096
        return made[0]

    monkeypatch.setattr(quantization, "CpuPipeline", pipeline)
    assert quantized(source, tmp_path / "lanes.safetensors", stats).read_bytes() == whole
    assert made


def test_on_the_fly_they_are_the_same(source: Path, stats: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(k=2, calibration=stats, device="cpu")
    decisions = Decisions(LocalFileStorage(source), options, {})
    run(plan_quantize(source, tmp_path / "x.safetensors", options))
    with safe_open(source, "pt") as plain, safe_open(tmp_path / "x.safetensors", "pt") as made:
        for name in SHAPES:
            for part, values in decisions.quantize(name, plain.get_tensor(name)).parts.items():
                assert torch.equal(values, made.get_tensor(f"{name}_{part}"))


def test_budgets_measure_columns(source: Path, stats: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(budget=Budget(bpw=3.0), calibration=stats, device="cpu")
    plan = plan_quantize(source, tmp_path / "x.safetensors", options)
    codec, stack = get_codec("planes"), safe_open(source, "pt").get_tensor(EXPERTS)
    levels, amax = torch.from_numpy(codec.levels("optimal", 3)[0].copy()), stack.abs().max()[None]
    loss = output = 0.0
    for w, h in zip(stack, [*HS[EXPERTS][:2], torch.diag(HS[EXPERTS][2].diagonal())], strict=True):
        factor = feedback.factorise(h, transposed=True)
        parts = feedback.encode(codec, w, Request(3, amax, "mse", levels), factor)
        loss += feedback.proxy_loss(w - codec.decode(parts, 96, torch.float32), h, transposed=True)
        output += feedback.proxy_loss(w, h, transposed=True)
    tensor = next(t for t in plan.tensors if t.name == EXPERTS)
    meter = FeedbackMeter(plan, TileReader(plan.checkpoint), "cpu")
    found = meter.measure(tensor, [(("planes", 3), levels)], float(amax))
    assert found.relative(("planes", 3)) == pytest.approx(loss / output, rel=1e-6)
    chosen = choose(plan).choice
    assert chosen is not None
    assert chosen.feedback_share == (1.0, pytest.approx((96 * 128 + 3 * 64 * 96) / (96 * 160 + 3 * 64 * 96)))


def test_machines_share_whole_experts(source: Path, stats: Path, tmp_path: Path) -> None:
    plan = plan_quantize(source, tmp_path / "x.safetensors", QuantizeOptions(k=2, calibration=stats, device="cpu"))
    chunks = [(c.name, c.start, c.stop) for c in chunks_of("write", plan, 5000)]
    assert chunks == [(EXPERTS, 0, 64), (EXPERTS, 64, 128), (EXPERTS, 128, 192), (MATRIX, 0, 96)]
