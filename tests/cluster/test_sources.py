"""Parts of plans for every kind of source and for options that name files: the bytes of one run."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import bytes_of, gaussian, model_tensors, write_folder
from helpers.fake_hub import FakeHub, tiny_repo
from helpers.gguf_file import f32, finite_blocks, gguf_bytes
from helpers.program import spawn
from kbitq.calibration.writer import Gathered, StatisticsWriter
from kbitq.checkpoint import QuantizeOptions, choose, plan_quantize, run
from kbitq.checkpoint.source.storage import Storage
from kbitq.choose.knapsack import Budget
from kbitq.choose.selection import TensorRule
from kbitq.cluster import Part, finish, save_plan, work
from kbitq.codecs.base import OUTPUTS, output_codec
from kbitq.errors import CheckpointError, SelectionError


def compare(source: Path | Storage, tmp_path: Path, options: QuantizeOptions, chunk_bytes: int = 3000) -> None:
    """Two parts against one run."""
    single = run(choose(plan_quantize(source, tmp_path / "a" / "out", options)))
    plan = save_plan(
        plan_quantize(source, tmp_path / "b" / "out", options), tmp_path / "plan.json", chunk_bytes=chunk_bytes
    ).path
    for index in (1, 0):
        work(plan, Part(index, 2), patience=0.0)
    report = finish(plan)
    assert bytes_of(report.out) == bytes_of(single.out)
    assert report.tensors == single.tensors and report.notes == single.notes


def fp8(*shape: int, seed: int) -> torch.Tensor:
    return (gaussian(*shape, seed=seed, dtype=torch.float32) * 1000).to(torch.float8_e4m3fn)


def test_scaled_fp8_quantized_and_kept(tmp_path: Path) -> None:
    """Kept FP8 is written as what it decodes to: twice the bytes that are read."""
    scale = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)) + 0.5
    names = ("model.up_proj.weight", "lm_head.weight")
    tensors = {n: fp8(300, 200, seed=i) for i, n in enumerate(names)} | {n + "_scale_inv": scale.clone() for n in names}
    source = write_folder(tmp_path / "fp8", {**tensors, "model.norm.weight": torch.ones(4)})
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (source / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    compare(source, tmp_path, QuantizeOptions(k=3))


def test_gguf(tmp_path: Path) -> None:
    def matrix(rows: int, cols: int) -> Any:
        return "Q8_0", (rows, cols), bytes(finite_blocks("Q8_0", rows * cols // 32))

    head = {"general.architecture": "llama", "llama.block_count": 1, "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2, "llama.embedding_length": 128, "llama.feed_forward_length": 256,
            "llama.context_length": 64, "llama.rope.dimension_count": 32,
            "llama.attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    tensors = {
        "token_embd.weight": matrix(32, 128),
        "blk.0.attn_q.weight": matrix(128, 128),
        "blk.0.ffn_down.weight": matrix(128, 256),
        "output_norm.weight": f32(torch.ones(128).numpy()),
    }
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes(head, tensors))
    compare(tmp_path / "tiny.gguf", tmp_path, QuantizeOptions(k=3))


@pytest.mark.parametrize("budget", [None, Budget(bpw=3.5)], ids=["k", "bpw by errors of outputs"])
def test_error_feedback(tmp_path: Path, budget: Budget | None) -> None:
    """Chunks of rows, each with the same factor of H."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(500, 96, generator=draw) @ torch.randn(96, 96, generator=draw)
    name, other = "a.q_proj.weight", "b.up_proj.weight"
    with StatisticsWriter(tmp_path / "stats", {"test": 1}) as writer:
        writer.add([Gathered({name: None}, 96, None, [500], [[x.T @ x]])])
        writer.finish({"model": "m"}, {"text": "t"}, {"kbitq": "0"}, replace=False)
    source = write_folder(tmp_path / "model", {name: gaussian(96, 96, seed=2), other: gaussian(96, 64, seed=3)})
    how: dict[str, Any] = {"k": 2} if budget is None else {"budget": budget}
    compare(source, tmp_path, QuantizeOptions(**how, calibration=tmp_path / "stats", device="cpu"))


WRITTEN_BY_ONE = {"gptq", "fp8-block", "bnb-nf4-double"}


@pytest.mark.parametrize("codec", sorted({*OUTPUTS, *WRITTEN_BY_ONE}))
def test_formats_of_other_tools(tmp_path: Path, codec: str) -> None:
    format_ = output_codec(codec)
    assert format_ is not None
    source = write_folder(tmp_path / "model", {f"layers.{i}.up_proj.weight": gaussian(96, 128, seed=i) for i in (0, 1)})
    options = QuantizeOptions(k=format_.ks[0], codec=codec, device="cpu")
    if codec in WRITTEN_BY_ONE:
        with pytest.raises(SelectionError, match="is written by one machine"):
            compare(source, tmp_path, options)
    else:
        compare(source, tmp_path, options)


def test_files_that_the_options_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given relative to one process's folder, found by another; changed since, refused."""
    source = write_folder(tmp_path / "model", model_tensors(), shards=2)
    levels = tmp_path / "levels.json"
    levels.write_text(json.dumps([-1.0, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1.0]))
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.rand(64) + 0.1}, tmp_path / "i.safetensors")
    monkeypatch.chdir(tmp_path)
    options = QuantizeOptions(
        k=3, codebook="levels.json", importance="i.safetensors", rules=(TensorRule("*conv*", codebook="levels.json"),)
    )
    planned = plan_quantize(source, Path("b/out"), options)
    plan = save_plan(planned, "plan.json", chunk_bytes=3000).path.absolute()
    single = run(plan_quantize(source, tmp_path / "a" / "out", options))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for index in range(2):
        work(plan, Part(index, 2), patience=0.0)
    levels_before = levels.read_text()
    levels.write_text(levels_before.replace("0.6", "0.7"))
    with pytest.raises(CheckpointError, match="the same options make another plan here"):
        finish(plan)
    levels.write_text(levels_before)
    finish(plan)
    assert bytes_of(tmp_path / "b" / "out") == bytes_of(single.out)


def test_a_budget_with_a_file_of_importance(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", model_tensors(), shards=2)
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.rand(64) + 0.1}, tmp_path / "i.safetensors")
    budget = Budget(bpw=3.5, error="importance", factors=(("*q_proj*", 2.0),), ties=("*up_proj*",))
    compare(source, tmp_path, QuantizeOptions(budget=budget, importance=tmp_path / "i.safetensors", codebook="fit"))


def test_another_config_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", model_tensors())
    plan = save_plan(plan_quantize(source, tmp_path / "out", QuantizeOptions(k=3)), tmp_path / "plan.json").path
    (source / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(CheckpointError, match=r"or config\.json, differs"):
        work(plan, Part(), patience=0.0)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of programs for which a Hub with one repository is the Hub."""
    fake = FakeHub()
    fake.repos["someone/tiny"] = tiny_repo()
    settings = {"HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": fake.token}
    yield {**os.environ, **settings, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    fake.close()


def test_a_repository_of_the_hub(hub: dict[str, str], tmp_path: Path) -> None:
    """Each worker fetches its own ranges; the plan names the commit."""

    def kbitq(*arguments: object) -> str:
        ended = spawn(*arguments, cwd=tmp_path, env=hub)
        assert ended.code == 0, ended.err
        return ended.err

    kbitq("plan", "someone/tiny", "--stream", "--k", 3, "-o", "parts", "--save", "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["source"].startswith("hub:someone/tiny@")
    for index in range(2):
        kbitq("work", "plan.json", "--part", f"{index}/2", "--patience", 0)
    kbitq("finish", "plan.json", "-q")
    kbitq("quantize", "someone/tiny", "--stream", "--k", 3, "-o", "single", "-q")
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "single")
