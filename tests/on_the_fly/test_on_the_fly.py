"""Weights that are quantized while a model is loaded, or in memory, are those that ``kbitq quantize`` writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="transformers is not installed")

import kbitq
from helpers.small_models import auto_class, make_model
from kbitq.calibration.statistics import Statistics
from kbitq.calibration.writer import Gathered, StatisticsWriter
from kbitq.checkpoint import QuantizeOptions, choose, plan_quantize, run
from kbitq.checkpoint.source import memory
from kbitq.checkpoint.source.open import open_checkpoint
from kbitq.choose.knapsack import Budget
from kbitq.choose.recipe import parse_rule
from kbitq.choose.selection import Selection
from kbitq.codecs import feedback
from kbitq.errors import KbitqError, OptionError
from kbitq.format import is_fused_experts, matrix_shape
from kbitq.nn import KbitEmbedding, KbitLinear, replace_linears
from kbitq.on_the_fly.sources import ModelFiles, TensorStorage

RULES = ["*.down_proj.weight=k5,codebook=nf", "*.output.dense.weight=k5", "*.q_proj.weight=keep"]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "k, absmax, nf": {"k": 5, "scale": "absmax", "codebook": "nf"},
    "fit": {"k": 3, "codebook": "fit"},
    "levels": {"k": 2, "codebook": [-1.0, -0.25, 0.25, 1.0]},
    "trellis": {"k": 3, "codec": "trellis"},
    "trellis/128": {"k": 2, "codec": "trellis", "scale_block": 128},
    "bpw": {"bpw": 3.4},
    "bpw, both codecs": {"bpw": 2.9, "codec": "auto"},
    "rules": {"k": 3, "rules": RULES},
    "rules, bpw": {"bpw": 3.6, "rules": RULES[:2]},
    "importance": {"k": 3, "importance": "stats"},
    "importance, fit": {"k": 3, "importance": "stats", "codebook": "fit"},
    "calibration": {"k": 2, "calibration": "stats"},
    "calibration, trellis": {"k": 2, "calibration": "stats", "codec": "trellis"},
    "calibration, trellis/128": {"k": 2, "calibration": "stats", "codec": "trellis/128"},
    "calibration, bpw": {"bpw": 3.4, "calibration": "stats"},
    "embeddings": {"k": 4, "keep_embeddings": False, "exclude": ["*.layers.0.*", "*.layer.0.*"]},
}


def stats_of(folder: Path, out: Path) -> Path:
    """Statistics of random inputs for most weights of a model; some have none, and one too few tokens."""
    draw, found = torch.Generator().manual_seed(0), []
    for number, tensor in enumerate(open_checkpoint(folder).tensors.values()):
        if Selection(2).verdict(tensor.name, tensor.shape, tensor.dtype).quantize and number % 7:
            experts = tensor.shape[0] if is_fused_experts(tensor.name, tensor.shape) else 1
            columns = matrix_shape(tensor.name, tensor.shape)[1]
            tokens = 10 if number % 5 == 0 else 300
            xs = [
                torch.randn(tokens, columns, generator=draw) * torch.rand(columns, generator=draw)
                for _ in range(experts)
            ]
            found.append(Gathered({tensor.name: None}, columns, None, [tokens] * experts, [[x.T @ x] for x in xs]))
    with StatisticsWriter(out, {"test": 1}) as writer:
        writer.add(found)
        writer.finish({"model": "m"}, {"text": "t"}, {"kbitq": "0"}, replace=False)
    return out


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """An ordinary folder of a kind of model, and statistics of it."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            make_model(kind).save_pretrained(root / "model")
            made[kind] = root / "model", stats_of(root / "model", root / "stats")
        return made[kind]

    return get


def as_the_command_does(source: Path, out: Path, options: dict[str, Any]) -> Path:
    given = dict(options)
    k, bpw, block = given.pop("k", None), given.pop("bpw", None), given.pop("scale_block", None)
    given["codec"] = "trellis/128" if block == 128 else given.get("codec", "planes")
    given["rules"] = tuple(parse_rule(rule) for rule in given.pop("rules", ()))
    given["exclude"] = tuple(p for p in given.pop("exclude", ()) if any(fits(source, p)))
    if not isinstance(given.get("codebook", ""), str):
        given["codebook"] = str(out.with_suffix(".json"))  # the command takes levels as a file
        Path(given["codebook"]).write_text(json.dumps({"levels": options["codebook"]}))
    budget = None if bpw is None else Budget(bpw=bpw)
    wanted = QuantizeOptions(k=4 if k is None and bpw is None else k, budget=budget, device="cpu", **given)
    run(choose(plan_quantize(source, out, wanted)))
    return out


def fits(source: Path, pattern: str) -> list[bool]:
    rule = parse_rule(f"{pattern}=keep")
    return [True for name in open_checkpoint(source).tensors if rule.matches(name)]


def resolved(options: dict[str, Any], source: Path, stats: Path) -> dict[str, Any]:
    """Options for this model: with its statistics, and without patterns that match nothing in it."""
    made = {key: str(stats) if value == "stats" else value for key, value in options.items()}
    for key in ("exclude", "rules"):
        if key in made:
            made[key] = [text for text in made[key] if fits(source, text.partition("=")[0])]
    return made


@pytest.mark.parametrize("wish", OPTIONS)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_files_of_the_command(
    kind: str, wish: str, sources: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, stats = sources(kind)
    options = resolved(OPTIONS[wish], source, stats)
    wanted = as_the_command_does(source, tmp_path / "command", options)
    config = kbitq.KbitqConfig.from_dict(kbitq.KbitqConfig(**options).to_dict())  # as transformers may hand it on
    model = auto_class(kind).from_pretrained(source, quantization_config=config)
    kbitq.save_pretrained(model, tmp_path / "fly")
    assert (tmp_path / "fly" / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
    said = [json.loads((path / "config.json").read_text()) for path in (tmp_path / "fly", wanted)]
    assert said[0]["quantization_config"] == said[1]["quantization_config"]


@pytest.mark.parametrize("wish", ["default", "rules", "importance", "calibration", "calibration, trellis", "bpw"])
def test_experts_that_are_stacked_while_loading(
    wish: str, sources: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, stats = sources("moe")
    options = resolved(OPTIONS[wish], source, stats)
    wanted = as_the_command_does(source, tmp_path / "command", options)
    model = auto_class("moe").from_pretrained(source, quantization_config=kbitq.KbitqConfig(**options))
    kbitq.save_pretrained(model, tmp_path / "fly")
    assert (tmp_path / "fly" / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
    again = auto_class("moe").from_pretrained(tmp_path / "fly")
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("wish", OPTIONS)
def test_a_model_in_memory(wish: str, sources: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    source, stats = sources("llama")
    options = resolved(OPTIONS[wish], source, stats)
    stored = load_file(as_the_command_does(source, tmp_path / "command", options) / "model.safetensors")
    model = auto_class("llama").from_pretrained(source)
    replace_linears(model, **options)
    packed = {n: m for n, m in model.named_modules() if isinstance(m, KbitLinear | KbitEmbedding)}
    assert {f"{name}.weight_packed" for name in packed} == {n for n in stored if n.endswith("_packed")}
    for name, layer in packed.items():
        for part, tensor in layer.parts.items():
            assert torch.equal(tensor, stored[f"{name}.weight_{part}"])
    fingerprint = Statistics.open(stats).fingerprint
    said = {(layer.info.importance, layer.info.calibrated) for layer in packed.values()}
    assert said == {(fingerprint if "importance" in options else None, None)} | (
        {(None, fingerprint)} if "calibration" in options else {(None, None)} if "importance" in options else set()
    )


def test_one_weight_with_an_h(sources: Callable[[str], tuple[Path, Path]]) -> None:
    w, x = torch.randn(40, 96), torch.randn(500, 96) @ torch.randn(96, 96)
    h = x.T @ x
    for codec in ("planes", "trellis"):
        losses = [
            feedback.proxy_loss(w - kbitq.dequantize(kbitq.quantize(w, 2, codec=codec, hessian=given)), h)
            for given in (None, h)
        ]
        assert losses[1] < 0.9 * losses[0]
    experts = torch.stack([w, w])
    both = kbitq.quantize(experts, 2, hessian=torch.stack([h, torch.eye(96)]), name="experts.w")
    alone = kbitq.quantize(w, 2, hessian=h)
    assert torch.equal(both.packed[0], alone.packed)
    with pytest.raises(ValueError, match=r"hessian has shape \[3, 3\], needs \[96, 96\]"):
        kbitq.quantize(w, 2, hessian=torch.eye(3))
    assert feedback.TILE_ELEMENTS == {"cpu": memory.FEEDBACK_ELEMENTS, "cuda": memory.FEEDBACK_ELEMENTS_ON_GPU}


def test_a_budget_needs_files(sources: Callable[[str], tuple[Path, Path]]) -> None:
    model = make_model("llama")
    load: Any = type(model).from_pretrained
    given = {"config": model.config, "state_dict": model.state_dict()}
    with pytest.raises(OptionError, match="so it takes a folder of safetensors files"):
        load(None, **given, quantization_config=kbitq.KbitqConfig(bpw=3))
    made = load(None, **given, quantization_config=kbitq.KbitqConfig(k=3, rules=["*.up_proj.weight=k5"]))
    assert (made.model.layers[0].mlp.up_proj.k, made.model.layers[0].mlp.down_proj.k) == (5, 3)


def test_experts_of_one_stack_must_be_alike(sources: Callable[[str], tuple[Path, Path]]) -> None:
    config = kbitq.KbitqConfig(k=3, rules=["*.experts.1.up_proj.weight=k4"])
    with pytest.raises(OptionError, match="its experts would have different K or codecs, and a stack has one"):
        auto_class("moe").from_pretrained(sources("moe")[0], quantization_config=config)


def test_options_that_there_are_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(96, 96))
    with pytest.raises(OptionError, match="replace_linears has no option 'codebok': did you mean 'codebook'"):
        replace_linears(model, 4, codebok="nf")
    with pytest.raises(OptionError, match="replace_linears has no option 'bits': did you mean 'k'"):
        replace_linears(model, bits=4)
    with pytest.raises(KbitqError, match=r"rule '\*\.up\*' matches no tensor"):
        replace_linears(model, 4, rules=["*.up*=k4"])
    assert isinstance(model[0], torch.nn.Linear)


def test_tensors_as_a_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.int16), "c": torch.zeros(0, 4)}
    storage = TensorStorage({**tensors, "d": torch.randn(4, 3).T})
    file = storage.open("")
    whole = bytearray(file.size)
    file.read_into(memoryview(whole), 0)
    from safetensors.torch import load

    assert all(torch.equal(load(bytes(whole))[name], tensor) for name, tensor in tensors.items())
    some = bytearray(9)
    file.read_into(memoryview(some), file.size - 50)
    assert bytes(some) == bytes(whole[file.size - 50 :][:9])
    save_file(tensors, tmp_path / "real.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "real.safetensors")
    assert set(open_checkpoint(ModelFiles([tmp_path / "link.safetensors"])).tensors) == set(tensors)
