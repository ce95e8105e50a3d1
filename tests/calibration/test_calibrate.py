"""Calibrating small models: H is x^T x of what every weight was really given, shared inputs and experts included."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

from helpers.small_models import auto_class, make_model, save_with_tokenizer
from kbitq.calibration import collect
from kbitq.calibration.calibrate import Options, calibrate
from kbitq.calibration.collect import Collector, NotSharedError, Sums
from kbitq.calibration.samples import draw
from kbitq.calibration.statistics import Statistics
from kbitq.calibration.weights import Weight
from kbitq.checkpoint.source.open import open_checkpoint
from kbitq.choose.importance import load_importance
from kbitq.errors import CalibrationError, CheckpointError, KbitqError, OutputExistsError

OPTIONS = Options(samples=4, length=32, device="cpu")


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    return save_with_tokenizer(make_model(kind, dtype=dtype), folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = save(kind, tmp_path_factory.mktemp(kind) / kind)
        return made[kind]

    return model


def inputs_of_linears(folder: Path, kind: str, windows: Tensor) -> dict[str, Tensor]:
    """Name of a linear layer's weight -> all that the layer was given, by hooks on the modules."""
    model = auto_class(kind).from_pretrained(folder)
    seen: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Any:
        return lambda _, given: seen.setdefault(name, []).append(given[0].reshape(-1, given[0].shape[-1]))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.no_grad():
        model(input_ids=windows)
    return {name: torch.cat(parts).double() for name, parts in seen.items()}


def drawn(folder: Path, text: Path, options: Options = OPTIONS) -> Tensor:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(), add_special_tokens=False)["input_ids"]
    return draw([torch.tensor(ids)], options.samples, options.length, options.seed)


def check_close(h: Tensor, x: Tensor) -> None:
    wanted = x.T @ x
    assert float((h - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_every_linear_layer(kind: str, models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    folder = models(kind)
    made = calibrate(folder, [text], tmp_path / "stats", OPTIONS)
    assert (made.tokens, made.notes) == (128, [])
    statistics = Statistics.open(tmp_path / "stats")
    given = inputs_of_linears(folder, kind, drawn(folder, text))
    tensors = open_checkpoint(folder).tensors
    assert set(statistics.names) == {
        n for n in given if n != "lm_head.weight" and tensors[n].shape[0] * tensors[n].shape[1] >= 4096
    }
    for name in statistics.names:
        found = statistics.of(name, tensors[name].shape)
        assert found is not None
        assert found.tokens == len(given[name])
        check_close(found.matrix(), given[name])
        assert torch.equal(found.diagonal(), found.matrix().diagonal())


def test_layers_that_are_given_one_tensor_share_one(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    summary = calibrate(models("bert"), [text], tmp_path / "stats", OPTIONS).summary
    layer = [list(e.tensors) for e in summary.entries if "layer.0." in e.name]
    at = "encoder.layer.0."
    assert layer == [
        [f"{at}attention.self.{name}.weight" for name in ("query", "key", "value")],
        [f"{at}attention.output.dense.weight"],
        [f"{at}intermediate.dense.weight"],
        [f"{at}output.dense.weight"],
    ]


def test_fused_experts_that_the_files_have_one_by_one(
    models: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    folder = models("moe")
    calibrate(folder, [text], tmp_path / "stats", OPTIONS)
    statistics = Statistics.open(tmp_path / "stats")
    model, given = auto_class("moe").from_pretrained(folder), {}
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(lambda _, args: given.update(x=args[0], chosen=args[1]))
    with torch.no_grad():
        model(input_ids=drawn(folder, text))
    for e in range(4):
        x = given["x"][(given["chosen"] == e).any(-1)].double()
        gate, up = (x @ experts.gate_up_proj[e].double().T).chunk(2, -1)
        for part, values in (("gate", x), ("up", x), ("down", experts.act_fn(gate) * up)):
            name = f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"
            shape = (64, 72) if part == "down" else (72, 64)
            found = statistics.of(name, shape)
            assert found is not None
            assert (found.tokens, found.experts) == (len(x), 1)
            check_close(found.matrix(), values.detach())


@pytest.mark.parametrize("max_memory", [None, 1_600_000], ids=["whole", "by layers"])
def test_experts_that_the_files_have_in_stacks(
    max_memory: int | None, models: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "stacks"
    shutil.copytree(models("moe"), folder)
    save_file(make_model("moe", dtype=torch.float32).state_dict(), folder / "model.safetensors", {"format": "pt"})
    options = Options(samples=4, length=32, device="cpu", max_memory=max_memory)
    made = calibrate(folder, [text], tmp_path / "stats", options)
    calibrate(models("moe"), [text], tmp_path / "parts", OPTIONS)
    stacks, parts = Statistics.open(tmp_path / "stats"), Statistics.open(tmp_path / "parts")
    assert made.notes == []
    at = "model.layers.0.mlp.experts."
    for name, part, shape in (("gate_up_proj", "up_proj", (4, 144, 64)), ("down_proj", "down_proj", (4, 64, 72))):
        found = stacks.of(at + name, shape)
        assert found is not None
        assert found.experts == 4
        for e in range(4):
            other = parts[f"{at}{e}.{part}.weight"]
            assert found.tokens_of(e) == other.tokens
            assert torch.equal(found.matrix(e), other.matrix())


def test_the_same_bytes_again(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        calibrate(models("llama"), [text], tmp_path / name, OPTIONS)
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == ["calibration.json", "hessians.safetensors"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_another_seed_draws_other_windows(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    a = calibrate(models("llama"), [text], tmp_path / "a", OPTIONS).summary
    b = calibrate(models("llama"), [text], tmp_path / "b", Options(samples=4, length=32, seed=1)).summary
    assert a.text["sha256"] != b.text["sha256"]
    assert a.model == b.model


def test_blocks_of_a_wide_input(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    calibrate(models("llama"), [text], tmp_path / "whole", OPTIONS)
    calibrate(models("llama"), [text], tmp_path / "blocks", Options(samples=4, length=32, hessian_block=64))
    name = "model.layers.0.mlp.down_proj.weight"
    whole, blocks = (Statistics.open(tmp_path / n).of(name, (64, 160)) for n in ("whole", "blocks"))
    assert whole is not None
    assert blocks is not None
    assert (whole.block, blocks.block) == (None, 64)
    mask = torch.block_diag(torch.ones(64, 64), torch.ones(64, 64), torch.ones(32, 32))
    torch.testing.assert_close(blocks.matrix(), whole.matrix() * mask)


def test_importance_is_the_diagonal_over_the_tokens(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    calibrate(models("llama"), [text], tmp_path / "stats", OPTIONS)
    statistics, name = Statistics.open(tmp_path / "stats"), "model.layers.0.mlp.down_proj.weight"
    importance = load_importance(tmp_path / "stats")
    assert importance.sha256 == statistics.fingerprint
    np.testing.assert_allclose(importance.of(name, (64, 160)), statistics[name].diagonal().numpy() / 128, rtol=1e-6)
    assert importance.of("lm_head.weight", (320, 64)) is None


def test_texts_of_each_kind_are_the_same_tokens(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    folder, words = models("llama"), text.read_text()
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(words, add_special_tokens=False)["input_ids"]
    np.array(ids, "<u2").tofile(tmp_path / "ids.tokens")
    half = words.index("The", 600)
    lines = [json.dumps({"said": part}) for part in (words[:half], words[half:])]
    (tmp_path / "lines.jsonl").write_text("\n\n".join(lines) + "\n")
    wanted = calibrate(folder, [text], tmp_path / "a", OPTIONS).summary
    for name in ("ids.tokens", "lines.jsonl"):
        options = Options(samples=4, length=32, field="said")
        assert calibrate(folder, [tmp_path / name], tmp_path / name[:3], options).summary == wanted


# --- windows ---------------------------------------------------------------------------------------


def test_windows_come_from_all_files_and_cross_none() -> None:
    files = [torch.arange(0, 25), torch.arange(100, 133)]
    windows = draw(files, 5, 10, seed=0)
    assert windows[:, 0].tolist() == [0, 10, 100, 110, 120]
    assert torch.equal(windows - windows[:, :1], torch.arange(10).expand(5, 10))
    some = draw(files, 3, 10, seed=0)[:, 0].tolist()
    assert sorted(some) == some
    assert set(some) < {0, 10, 100, 110, 120}


def test_a_text_that_is_too_short_says_how_much_there_is() -> None:
    with pytest.raises(CalibrationError, match="25 tokens are 2 windows of 10, and 3 are wanted") as raised:
        draw([torch.arange(25)], 3, 10, seed=0)
    assert "2 windows" in str(raised.value.hint)


def test_a_window_is_no_longer_than_the_model_takes(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    made = calibrate(models("llama"), [text], tmp_path / "stats", Options(samples=2, length=200))
    assert made.summary.text["length"] == 64
    assert made.notes == ["the model takes 64 tokens, so windows have as many, not 200"]


# --- collecting ------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """Two layers that are given one tensor at first, and later, or from the start, two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def collected(self, share: bool, *pairs: tuple[Tensor, Tensor]) -> Any:
        weights = [Weight(f"{n}.weight", (64, 64), {f"{n}.weight": None}) for n in ("a", "b")]
        collector = Collector(weights, dict(self.named_parameters()), None, share=share)
        with torch.no_grad(), collector:
            for x, y in pairs:
                self.a(x), self.b(y)
        return collector.gathered()


def values(seed: int) -> Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))


def test_equal_values_in_other_memory_are_not_shared() -> None:
    x = values(0)
    found, unseen = TwoLayers().collected(True, (x, x.clone()))
    assert ([list(each.tensors) for each in found], unseen) == ([["a.weight"], ["b.weight"]], [])
    found, _ = TwoLayers().collected(True, (x, x.view(3, 1, 64)))
    assert [list(each.tensors) for each in found] == [["a.weight", "b.weight"]]


def test_a_tensor_that_was_changed_in_place_is_not_the_same() -> None:
    x, layers = values(0), TwoLayers()
    weights = [Weight(f"{n}.weight", (64, 64), {f"{n}.weight": None}) for n in ("a", "b")]
    with torch.no_grad(), Collector(weights, dict(layers.named_parameters()), None) as collector:
        layers.a(x)
        layers.b(x.mul_(2))
    found, _ = collector.gathered()
    assert [list(each.tensors) for each in found] == [["a.weight"], ["b.weight"]]


def test_inputs_that_part_later_are_noticed_and_collected_apart() -> None:
    x, y = values(0), values(1)
    with pytest.raises(NotSharedError):
        TwoLayers().collected(True, (x, x), (y, x))
    found, _ = TwoLayers().collected(False, (x, x), (y, x))
    torch.testing.assert_close(found[0].sums[0][0], x.T @ x + y.T @ y)
    torch.testing.assert_close(found[1].sums[0][0], 2 * x.T @ x)


def test_a_layer_that_is_used_less_often_than_the_one_it_shares_with() -> None:
    x = values(0)
    layers = TwoLayers()
    weights = [Weight(f"{n}.weight", (64, 64), {f"{n}.weight": None}) for n in ("a", "b")]
    with torch.no_grad(), Collector(weights, dict(layers.named_parameters()), None) as collector:
        layers.a(x), layers.b(x)
        layers.a(values(1))
    with pytest.raises(NotSharedError):
        collector.gathered()


def test_values_that_are_not_finite_are_an_error() -> None:
    x = values(0)
    x[0, 3] = float("inf")
    with pytest.raises(CalibrationError, match=r"what goes into a\.weight is not finite"):
        TwoLayers().collected(True, (x, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sums_are_float32_whatever_the_inputs_are(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(5000, 96, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    sums = Sums(96, None)
    for part in x.split(1700):
        sums.add(part)
    assert sums.matrices is not None
    assert sums.matrices[0].dtype == torch.float32
    assert sums.tokens == 5000
    check_close(sums.matrices[0].cpu(), x.double().cpu())


# --- real models -----------------------------------------------------------------------------------


def test_a_real_language_model(pycode_llama: Path, networkx_tokens: Path, tmp_path: Path) -> None:
    ids = np.fromfile(networkx_tokens, "<u2")[:1200]
    ids.tofile(tmp_path / "some.tokens")
    options = Options(samples=4, length=128, device="cpu")
    made = calibrate(pycode_llama, [tmp_path / "some.tokens"], tmp_path / "stats", options)
    statistics, tensors = Statistics.open(made.out), open_checkpoint(pycode_llama).tensors
    assert made.notes == []
    assert len(statistics) == sum(name.endswith("_proj.weight") for name in tensors)
    for name in statistics.names:
        found = statistics.of(name, tensors[name].shape)
        assert found is not None
        assert found.tokens == 512
        assert (found.diagonal() > 0).any()


def test_a_real_encoder(minilm: Path, text: Path, tmp_path: Path) -> None:
    made = calibrate(minilm, [text], tmp_path / "stats", Options(samples=4, length=64, device="cpu"))
    assert len(Statistics.open(made.out)) == 37
    assert made.notes == []


# --- errors ----------------------------------------------------------------------------------------


def test_an_output_that_exists(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "stats"
    calibrate(models("llama"), [text], out, OPTIONS)
    with pytest.raises(OutputExistsError, match="stats exists"):
        calibrate(models("llama"), [text], out, OPTIONS)
    again = calibrate(models("llama"), [text], out, Options(samples=2, length=32, force=True))
    assert Statistics.open(out).fingerprint == again.summary.fingerprint
    (out / "mine.txt").write_text("keep")
    with pytest.raises(OutputExistsError, match=r"holds mine\.txt"):
        calibrate(models("llama"), [text], out, Options(samples=2, length=32, force=True))


def test_what_is_no_model(text: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent does not exist"):
        calibrate(tmp_path / "absent", [text], tmp_path / "stats")


def test_a_model_that_multiplies_in_a_way_of_its_own(
    models: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "PRODUCTS", {})
    with pytest.raises(CalibrationError, match=r"no input of .* was seen"):
        calibrate(models("llama"), [text], tmp_path / "stats", OPTIONS)
    assert not list(tmp_path.glob("*stats*"))


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.jsonl", '{"text": "a"}\nb\n', r"a\.jsonl: line 2 is not JSON"),
        ("a.jsonl", '{"words": "a"}\n', r"a\.jsonl: line 1 has no text in a field 'text'"),
        ("a.jsonl", "\n", r"a\.jsonl has no lines"),
        ("a.tokens", "abc", r"does not hold token ids below 320"),
        ("a.txt", "short", r"5 tokens are 0 windows of 32, and 4 are wanted"),
    ],
)
def test_texts_that_cannot_be_used(
    name: str, content: str, said: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(KbitqError, match=said):
        calibrate(models("llama"), [tmp_path / name], tmp_path / "stats", OPTIONS)


def test_a_run_that_is_interrupted_leaves_nothing(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(models("llama"), [text], tmp_path / "stats", OPTIONS, stop)
    assert not list(tmp_path.glob("*stats*"))
