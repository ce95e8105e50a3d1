"""Weights that are stored [in, out]: GPT-2's layers, and stacks of experts that are multiplied as they lie."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

from helpers.small_models import make_model, save_with_tokenizer
from kbitq.calibration.calibrate import Options, calibrate
from kbitq.calibration.collect import Collector
from kbitq.calibration.statistics import Statistics
from kbitq.calibration.weights import Weight
from kbitq.choose.importance import load_importance
from kbitq.errors import CalibrationError

OPTIONS = Options(samples=4, length=32, device="cpu")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(make_model("gpt2", dtype=torch.float32), tmp_path_factory.mktemp("gpt2") / "gpt2")


def gpt_oss() -> Any:
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=320, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        sliding_window=16, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


def check_close(h: torch.Tensor, x: torch.Tensor) -> None:
    wanted = x.double().T @ x.double()
    assert float((h - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_gpt2s_layers_have_an_h_of_their_rows(gpt2: Path, text: Path, tmp_path: Path) -> None:
    made = calibrate(gpt2, [text], tmp_path / "stats", OPTIONS)
    assert made.notes == []
    statistics = Statistics.open(tmp_path / "stats")
    at = "transformer.h.0."
    shapes = {"attn.c_attn": (64, 192), "attn.c_proj": (64, 64), "mlp.c_fc": (64, 256), "mlp.c_proj": (256, 64)}
    for name, shape in shapes.items():
        found = statistics.of(f"{at}{name}.weight", shape)
        assert found is not None
        assert (found.transposed, found.columns, found.tokens) == (True, shape[0], 128)
    assert json.loads((tmp_path / "stats/calibration.json").read_text())["version"] == 2
    with pytest.raises(CalibrationError, match=r"are for 64 rows, but its shape is \[192, 64\]"):
        statistics.of(f"{at}attn.c_attn.weight", (192, 64))
    assert len(load_importance(tmp_path / "stats")) == 0  # within a row all weights count the same


def test_layer_by_layer_finds_the_same(gpt2: Path, text: Path, tmp_path: Path) -> None:
    whole = calibrate(gpt2, [text], tmp_path / "whole", OPTIONS).summary
    layers = calibrate(gpt2, [text], tmp_path / "layers", Options(4, 32, device="cpu", max_memory=2_000_000)).summary
    assert [(e.tensors, e.sha256) for e in whole.entries] == [(e.tensors, e.sha256) for e in layers.entries]


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    model, given = gpt_oss(), {}
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(320, (4, 32), generator=torch.Generator().manual_seed(0))
    (tmp_path / "all.tokens").write_bytes(ids.numpy().astype("<u2").tobytes())
    assert calibrate(tmp_path / "model", [tmp_path / "all.tokens"], tmp_path / "stats", OPTIONS).notes == []
    statistics, name = Statistics.open(tmp_path / "stats"), "model.layers.1.mlp.experts.gate_up_proj"
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(lambda _, args: given.update(x=args[0], chosen=args[1]))
    with torch.no_grad():
        model.model(input_ids=ids)
    found = statistics.of(name, experts.gate_up_proj.shape)
    assert found is not None
    assert (found.transposed, found.experts, found.columns) == (True, 4, 64)
    for e in range(4):
        x = given["x"].reshape(-1, 64)[(given["chosen"] == e).any(-1)]
        assert found.tokens_of(e) == len(x)
        check_close(found.matrix(e), x)
    down = statistics.of("model.layers.1.mlp.experts.down_proj", (4, 96, 64))
    assert down is not None
    assert (down.transposed, down.columns) == (True, 96)


def test_a_stack_that_is_multiplied_at_once_counts_the_tokens_that_are_not_zero() -> None:
    stack, x = nn.Parameter(torch.randn(3, 64, 40)), torch.randn(3, 10, 64)
    x[0, 4:], x[2] = 0, 0
    weight = Weight("experts.w", (3, 64, 40), {"experts.w": None})
    for product in (torch.bmm, torch.matmul):
        with torch.no_grad(), (collector := Collector([weight], {"experts.w": stack}, None)):
            product(x, stack)
            torch.bmm(x, torch.randn(3, 64, 64))  # of no weight
        found = collector.gathered()[0][0]
        assert (list(found.tokens), found.columns, found.transposed) == ([4, 10, 0], 64, True)
        assert found.sums[1] is not None
        check_close(found.sums[1][0], x[1])


def test_a_weight_turned_round_is_as_linear_has_it() -> None:
    w, x = nn.Parameter(torch.randn(96, 64)), torch.randn(10, 64)
    weight = Weight("w", (96, 64), {"w": None})
    for call in (lambda: x @ w.T, lambda: torch.addmm(torch.zeros(96), x, w.T), lambda: nn.functional.linear(x, w)):
        with torch.no_grad(), (collector := Collector([weight], {"w": w}, None)):
            call()
        found = collector.gathered()[0][0]
        assert (found.columns, found.transposed, found.tokens) == (64, False, [10])
