"""Codecs other than ``planes`` in transformers: a model loads, runs, is saved and is made with each.

``trellis``, and ``stepped8``, which nothing in kbitq knows: an int8 code a weight and one float32 step for the whole
tensor, a constant as codebooks are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kbitq
from helpers.codecs import registered
from helpers.small_models import auto_class, outputs
from helpers.small_models import load_complete as load
from helpers.tolerances import LOGITS, relative_error
from kbitq.checkpoint import dequantize_checkpoint
from kbitq.codecs.base import Part, Request, SpanLike
from kbitq.errors import FormatError
from kbitq.format import is_fused_experts
from kbitq.nn import KbitEmbedding, KbitExperts, KbitLinear

BITS = 8
OPTIONS = {"stepped8": {"k": BITS}, "trellis": {"k": 2}, "trellis/128": {"k": 1}}
PACKED_WHOLE = ["llama", "llama-tied", "moe", "bert"]  # no quantized tensor of these is decoded on load


class Stepped:
    """What :class:`kbitq.codecs.base.Codec` asks for; of a stack, codes keep its three dimensions."""

    name = "stepped8"
    ks = (BITS,)
    cut = 1

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        lead = tuple(shape[:2]) if is_fused_experts(name, shape) else (shape[0],)
        cols = torch.Size(shape[len(lead) :]).numel()
        return Part("codes", "I8", (*lead, cols)), Part("step", "F32", (1,), constant=True)

    def levels(self, spec: Any, k: int) -> tuple[None, str]:
        return None, "none"

    def encode(self, w: torch.Tensor, request: Request) -> dict[str, torch.Tensor]:
        made = {"codes": torch.empty(w.shape, dtype=torch.int8), "step": torch.empty(1)}
        self.encode_into(w, request, made)
        return made

    def encode_into(self, w: torch.Tensor, request: Request, parts: Mapping[str, torch.Tensor]) -> None:
        parts["step"].copy_(request.amax / 127)
        parts["codes"].copy_((w.float() / parts["step"]).round())

    def decode(
        self, parts: Mapping[str, torch.Tensor], cols: int, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert parts["step"].shape == (1,)
        wide = parts["codes"].float() * parts["step"]
        return wide.to(dtype) if out is None else out.copy_(wide)

    def stats(self, w: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        error = (w.float() - self.decode(parts, w.shape[1], torch.float32)).double()
        return torch.stack([w.double().square().sum(1), error.square().sum(1), error.abs().amax(1)], 1)

    def place(self, span: SpanLike, k: int) -> dict[str, int]:
        return {"codes": span.first_element}

    def k_of(self, name: str, shapes: Mapping[str, Sequence[int]]) -> int:
        return BITS

    def shape_of(self, name: str, k: int, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        return tuple(shapes["codes"])

    def check(self, parts: Mapping[str, torch.Tensor], where: str) -> None:
        if not bool((parts["step"] >= 0).all()):
            raise FormatError(f"{where} is negative")

    def problems(self, parts: Mapping[str, torch.Tensor]) -> list[str]:
        return []

    def levels_of(self, parts: Mapping[str, torch.Tensor]) -> None:
        return None

    def scale_counts(self, part: str, data: torch.Tensor) -> None:
        return None

    def linear(self, x: torch.Tensor, parts: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        steps = parts["step"].reshape(-1, 1).repeat_interleave(len(parts["codes"]) // parts["step"].numel(), 0)
        return torch.nn.functional.linear(x, (parts["codes"].float() * steps).to(x.dtype), bias)

    def tiles(self, parts: Mapping[str, torch.Tensor], cols: int, expert: int | None = None) -> None:
        return None


@pytest.fixture(params=OPTIONS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a folder is quantized with, and what ``KbitqConfig`` takes: of the codec here, and of those of kbitq."""
    return {**OPTIONS[request.param], "codec": request.param, "keep_embeddings": False}


@pytest.fixture(autouse=True)
def stepped() -> Iterator[Stepped]:
    with registered(Stepped()) as codec:
        yield codec


def modules(model: torch.nn.Module, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(t.dtype == b[n].dtype and torch.equal(t, b[n]) for n, t in a.items())


@pytest.mark.parametrize("kind", [*PACKED_WHOLE, "gpt2"])
def test_a_folder_computes_what_the_decoded_one_does(kind: str, options, folders, tmp_path: Path) -> None:
    _, folder = folders(kind, **options)
    model = load(kind, folder, dtype=torch.float32)
    assert {m.info.codec for m in modules(model, KbitLinear | KbitEmbedding)} <= {options["codec"]}
    assert bool(modules(model, KbitExperts)) == (kind == "moe")
    assert modules(model, KbitEmbedding)
    dequantize_checkpoint(folder, tmp_path / "decoded", dtype="float32")
    reference = auto_class(kind).from_pretrained(tmp_path / "decoded", dtype=torch.float32)
    assert relative_error(outputs(model, kind), outputs(reference, kind)) < LOGITS[torch.float32]
    ordinary = load(kind, folder, dtype=torch.float32, quantization_config=kbitq.KbitqConfig(dequantize=True))
    assert same(ordinary.state_dict(), reference.state_dict())
    assert model.num_parameters() == reference.num_parameters()
    model.dequantize()
    assert same(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("kind", PACKED_WHOLE)
def test_a_folder_comes_back_as_it_was(kind: str, options, folders, tmp_path: Path) -> None:
    _, folder = folders(kind, **options)
    kbitq.save_pretrained(load(kind, folder), tmp_path / "ours")
    for file in folder.glob("*.safetensors"):
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()
    load(kind, folder).save_pretrained(tmp_path / "theirs")
    assert same(weights(tmp_path / "theirs"), weights(folder))
    said = [json.loads((f / "config.json").read_text())["quantization_config"] for f in (folder, tmp_path / "theirs")]
    assert said[0] == said[1]
    assert said[0]["codec"] == options["codec"].split("/")[0]


@pytest.mark.parametrize("kind", PACKED_WHOLE)
def test_on_the_fly_it_is_the_same_model(kind: str, options, folders, tmp_path: Path) -> None:
    source, folder = folders(kind, **options)
    model = load(kind, source, quantization_config=kbitq.KbitqConfig(**options))
    assert same(model.state_dict(), load(kind, folder).state_dict())
    model.save_pretrained(tmp_path)
    assert same(weights(tmp_path), weights(folder))


def test_files_without_metadata_are_read_by_the_config(options, folders, tmp_path: Path) -> None:
    _, folder = folders("llama", **options)
    whole = load("llama", folder)
    whole.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        save_file(load_file(file), file, {"format": "pt"})
    assert same(load("llama", tmp_path).state_dict(), whole.state_dict())


def test_the_codec_says_what_is_wrong_with_a_constant(folders, tmp_path: Path) -> None:
    _, folder = folders("llama", codec="stepped8", **OPTIONS["stepped8"])
    load("llama", folder).save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight_step"].neg_()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(FormatError, match=r"tensor model.layers.0.self_attn.q_proj.weight_step is negative"):
        load("llama", tmp_path)
