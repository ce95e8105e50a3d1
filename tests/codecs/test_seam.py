"""The seam is real: a codec that stands in this file alone goes through every stage of a checkpoint and of a model.

``toy8``: an int8 index a weight, a float32 scale for 32 columns. Nothing in kbitq knows it.
"""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kbitq
from helpers import fresh
from helpers.codecs import registered
from kbitq import format as fmt
from kbitq._core import core
from kbitq.checkpoint import QuantizeOptions, dequantize_checkpoint, inspect, plan_quantize, run, verify
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.codecs import base
from kbitq.codecs.base import Part, Request, SpanLike
from kbitq.errors import CodecError, FormatError
from kbitq.nn import KbitEmbedding, KbitLinear
from kbitq.ops import codec as codec_ops

BLOCK = 32
BITS = 8


class Toy:
    """Round to nearest: what :class:`kbitq.codecs.base.Codec` asks for, in the fewest lines."""

    name = "toy8"
    ks = (BITS,)
    cut = BLOCK

    def parts(self, name: str, shape: Sequence[int], k: int) -> tuple[Part, ...]:
        rows, cols = shape[0], torch.Size(shape[1:]).numel()
        return Part("steps", "F32", (rows, -(-cols // BLOCK))), Part("codes", "I8", (rows, cols))

    def levels(self, spec: Any, k: int) -> tuple[None, str]:
        return None, "none"

    def encode(self, w: torch.Tensor, request: Request) -> dict[str, torch.Tensor]:
        made = {p.name: torch.empty(p.shape, dtype=d) for p, d in zip(self.parts("", w.shape, 8), DTYPES, strict=True)}
        self.encode_into(w, request, made)
        return made

    def encode_into(self, w: torch.Tensor, request: Request, parts: Mapping[str, torch.Tensor]) -> None:
        blocks = torch.nn.functional.pad(w.float(), (0, -w.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        steps = blocks.abs().amax(2) / 127
        parts["steps"].copy_(steps)
        codes = (blocks / steps.clamp(min=1e-30)[..., None]).round().flatten(1)[:, : w.shape[1]]
        parts["codes"].copy_(codes.to(torch.int8))

    def decode(
        self, parts: Mapping[str, torch.Tensor], cols: int, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        wide = parts["steps"].repeat_interleave(BLOCK, 1)[:, :cols] * parts["codes"].float()
        return wide.to(dtype) if out is None else out.copy_(wide)

    def stats(self, w: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        error = (w.float() - self.decode(parts, w.shape[1], torch.float32)).double()
        return torch.stack([w.double().square().sum(1), error.square().sum(1), error.abs().amax(1)], 1)

    def place(self, span: SpanLike, k: int) -> dict[str, int]:
        return {"steps": span.first_block * 4, "codes": span.first_element}

    def k_of(self, name: str, shapes: Mapping[str, Sequence[int]]) -> int:
        return BITS

    def shape_of(self, name: str, k: int, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        return tuple(shapes["codes"])

    def check(self, parts: Mapping[str, torch.Tensor], where: str) -> None: ...

    def problems(self, parts: Mapping[str, torch.Tensor]) -> list[str]:
        return []

    def levels_of(self, parts: Mapping[str, torch.Tensor]) -> None:
        return None

    def scale_counts(self, part: str, data: torch.Tensor) -> tuple[int, int, int] | None:
        return (data.numel(), int((data == 0).sum()), 0) if part == "steps" else None

    def linear(self, x: torch.Tensor, parts: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.decode(parts, x.shape[-1], x.dtype), bias)

    def tiles(self, parts: Mapping[str, torch.Tensor], cols: int, expert: int | None = None) -> None:
        return None


DTYPES = (torch.float32, torch.int8)


@pytest.fixture(autouse=True)
def toy() -> Iterator[Toy]:
    with registered(Toy()) as codec:
        yield codec


@pytest.fixture
def source(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(96, 200 + i, generator=generator) for i in range(4)}
    tensors["norm.weight"] = torch.ones(200)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def plan_of(source: Path, out: Path, **options: Any) -> Any:
    return plan_quantize(source, out, QuantizeOptions(k=BITS, codec="toy8", **options))


def expected(source: Path) -> dict[str, torch.Tensor]:
    """What the file must decode to, from the codec alone."""
    found = {}
    with safe_open(source, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a dict)
            w = file.get_tensor(name)
            if w.dim() == 2:
                parts = Toy().encode(w, Request(BITS, torch.ones(1)))
                found[name] = Toy().decode(parts, w.shape[1], w.dtype)
    return found


def test_through_plan_quantize_verify_inspect_load_and_dequantize(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    plan = plan_of(source, out)
    report = run(plan)
    assert plan.shards[0].nbytes == out.stat().st_size, "a plan knows the size to the byte"
    assert report.totals["bits_per_weight"] == pytest.approx(8 + 32 * 7 / 201.5, rel=0.01)
    with safe_open(out, framework="pt") as file:
        metadata = json.loads(file.metadata()["kbitq"])
    assert metadata["format_version"] == 2
    assert {t["codec"] for t in metadata["tensors"].values()} == {"toy8"}

    found = verify(out, source, full=True)
    assert found.ok, found.problems
    assert "4 of 4" in " ".join(found.checks)
    row = next(r for r in inspect(out, against=source).tensors if r["name"] == "layers.0.weight")
    assert row["codec"] == "toy8"
    assert row["sqnr_db"] > 40

    loaded, wanted = kbitq.load_file(out), expected(source)
    for name, values in wanted.items():
        q = loaded[name]
        assert isinstance(q, kbitq.QuantizedTensor)
        assert torch.equal(q.dequantize(), values), name
    dequantize_checkpoint(out, tmp_path / "back.safetensors")
    with safe_open(tmp_path / "back.safetensors", framework="pt") as file:
        assert all(torch.equal(file.get_tensor(name), values) for name, values in wanted.items())

    kbitq.save_file(loaded, tmp_path / "again.safetensors")
    assert {n: t.shape for n, t in kbitq.load_file(tmp_path / "again.safetensors").items()} == {
        n: t.shape for n, t in loaded.items()
    }


def test_tiles_of_any_size_give_the_same_bytes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(plan_of(source, tmp_path / "whole.safetensors"))
    monkeypatch.setattr("kbitq.checkpoint.source.tile_reader.MIN_TILE_BYTES", 64)
    for tile in (400, 3000, 20_000):  # a row is cut, some rows, many
        monkeypatch.setattr("kbitq.checkpoint.quantization.tile_bytes", lambda *_, tile=tile: tile)
        run(plan_of(source, tmp_path / f"{tile}.safetensors"))
        assert (tmp_path / f"{tile}.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


HERE = Path(__file__).parent
KILLED = """
import os, sys
sys.path = [{here!r}, *sys.path, {tests!r}]
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.codecs import base
from kbitq.checkpoint import run
from kbitq.checkpoint.passes import journal
from kbitq.checkpoint.source.progress import Progress
from test_seam import Toy, plan_of
from pathlib import Path
base.register(Toy())
journal.SYNC_SECONDS = 0.0
import kbitq.checkpoint.quantization as quantization
quantization.tile_bytes = lambda *_: 3000
def progress(at: Progress) -> None:
    if at.bytes_done > 0.75 * at.bytes_total:
        os.kill(os.getpid(), 9)
run(plan_of(Path({source!r}), Path({out!r})), progress)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "killed.safetensors"
    program = KILLED.format(here=str(HERE), tests=str(HERE.parent), source=str(source), out=str(out))
    done = fresh.run("-c", program)
    assert done.returncode == -signal.SIGKILL, done.stderr
    partial = tmp_path / f".{out.name}.kbitq-partial"
    assert partial.is_dir()
    assert not out.exists()
    read: list[int] = []
    read_into = TileReader.read_into

    def counting(self: TileReader, tensor: Any, start: int, target: torch.Tensor) -> None:
        read.append(target.numel())
        read_into(self, tensor, start, target)

    monkeypatch.setattr(TileReader, "read_into", counting)
    run(plan_of(source, out))
    again, _ = sum(read), read.clear()
    run(plan_of(source, tmp_path / "whole.safetensors"))
    assert 0 < again < 0.6 * sum(read), "what was done is not done again"
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_layers_multiply_by_it() -> None:
    torch.manual_seed(0)
    dense = torch.nn.Linear(100, 64)
    layer = KbitLinear.from_linear(dense, BITS, codec="toy8")
    assert {n for n, _ in layer.named_parameters()} == {"weight_steps", "weight_codes", "bias"}
    x = torch.randn(3, 100, requires_grad=True)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, dense.bias))
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.to(torch.bfloat16).parts["codes"].dtype == torch.int8
    other = KbitLinear(100, 64, BITS, codec="toy8")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.dequantize(), layer.dequantize(torch.float32))

    table = KbitEmbedding.from_embedding(torch.nn.Embedding(50, 40), BITS, codec="toy8")
    ids = torch.tensor([[3, 1], [49, 0]])
    assert torch.equal(table(ids), table.weight[ids])


def test_a_file_whose_codec_is_unknown_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    run(plan_of(source, out))
    base.unregister("toy8")
    with pytest.raises((CodecError, FormatError), match="'toy8' is not known"):
        kbitq.load_file(out)
    report = verify(out)
    assert not report.ok
    assert "'toy8' is not known" in report.problems[0]
    with pytest.raises(CodecError, match="'toy8' is not known"):
        plan_of(source, tmp_path / "other.safetensors")


def test_the_core_knows_the_codecs_of_the_table() -> None:
    for name, columns in fmt.CODECS.items():
        assert base.get_codec(name).name == name
        assert codec_ops.layout_of(name).scale_block == columns
        assert core.tile_shape(16, 256, 2, name)
    with pytest.raises(ValueError, match="trellis/64"):
        core.tile_shape(16, 256, 2, "trellis/64")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(CodecError, match="already"):
        base.register(Toy())
    assert base.codec_names() == ("planes", "trellis", "trellis/128", "toy8")
