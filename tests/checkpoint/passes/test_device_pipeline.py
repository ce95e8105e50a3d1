"""Tiles in flight on several devices: the same bytes as one after the other, whatever fails or is short on the way.

Lanes on the CPU stand in for GPUs where there are none: order, bounds, parts and errors are the same code.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import Interrupting, bytes_of, gaussian, write_folder
from kbitq import ops
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run
from kbitq.checkpoint.passes import journal, lane
from kbitq.checkpoint.passes.device_pipeline import DevicePipeline
from kbitq.checkpoint.passes.devices import resolve_devices
from kbitq.checkpoint.source.tile_reader import TileReader
from kbitq.errors import BuildError, CheckpointError, NonFiniteError, SelectionError

Go = Callable[..., Path]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Tensors of many small tiles: rows longer than a tile, types to convert, experts, kept ones between."""
    tensors = {
        "model.embed_tokens.weight": gaussian(700, 128, seed=1),
        "model.layers.0.wide.weight": gaussian(5, 70_003, seed=2, dtype=torch.float32),
        "model.layers.0.tall.weight": gaussian(3000, 128, seed=3),
        "model.layers.0.norm.weight": torch.ones(128),
        "model.layers.1.half.weight": gaussian(900, 100, seed=4, dtype=torch.float16),
        "model.layers.1.mlp.experts.gate_up_proj": gaussian(4, 300, 64, seed=5),
        "model.layers.1.double.weight": gaussian(400, 160, seed=6, dtype=torch.float64),
        "model.none.weight": torch.empty(0, 3),
    }
    return write_folder(tmp_path / "model", tensors, shards=2)


@pytest.fixture
def devices(device: str) -> tuple[str, ...]:
    """All devices of a kind; one is taken twice, so that tiles are shared out."""
    present = resolve_devices(device)
    return (present * 2)[:2] if len(present) == 1 else present


def go(source: Path, out: Path, stop_after: int | None = None, **more: object) -> Path:
    """Run with the smallest tiles, stopping with Ctrl-C at a progress call; returns the output."""
    options = QuantizeOptions(**{"k": 3, "max_memory": 1, "max_shard_size": 300_000, "device": "cpu", **more})
    run(plan_quantize(source, out, options), Interrupting(stop_after))
    return out


@pytest.fixture
def piped(devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Go:
    """``go`` through a pipeline on the devices."""

    def call(*args: object, **options: object) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr("kbitq.checkpoint.quantization.resolve_devices", lambda wanted: devices)
            return go(*args, **options)  # type: ignore[arg-type]

    return call


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_the_same_bytes(source: Path, tmp_path: Path, piped: Go, k: int) -> None:
    for scale in ("mse", "absmax"):
        want = go(source, tmp_path / f"one-{scale}", k=k, scale=scale)
        assert bytes_of(piped(source, tmp_path / f"many-{scale}", k=k, scale=scale)) == bytes_of(want)


def test_with_importance_and_fitted_levels(source: Path, tmp_path: Path, piped: Go) -> None:
    """Both are made between tiles, fitting by reading the tensor once more while others are in flight."""
    weights = {"model.layers.0.tall": torch.rand(128), "model.layers.1.mlp.experts.gate_up_proj": torch.rand(4, 64)}
    save_file(weights, tmp_path / "importance.safetensors")
    more = {"codebook": "fit", "importance": tmp_path / "importance.safetensors"}
    want = go(source, tmp_path / "one", **more)
    assert bytes_of(piped(source, tmp_path / "many", **more)) == bytes_of(want)


def test_interrupted_and_taken_up_by_the_other_way(
    source: Path, tmp_path: Path, piped: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SYNC_SECONDS", 0.0)
    want = bytes_of(go(source, tmp_path / "whole"))
    for stop in (2, 9, 30, 55):
        out = tmp_path / f"out-{stop}"
        with pytest.raises(KeyboardInterrupt):
            piped(source, out, stop_after=stop)
        with pytest.raises(KeyboardInterrupt):
            go(source, out, stop_after=stop)
        assert bytes_of(piped(source, out)) == want


def short_of_memory(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """A GPU with room for so many elements of a tile."""

    def limited(real: Callable[..., object]) -> Callable[..., object]:
        def call(w: torch.Tensor, *args: object, **options: object) -> object:
            if w.numel() > elements:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(w, *args, **options)

        return call

    monkeypatch.setattr(ops, "scan", limited(ops.scan))
    monkeypatch.setattr(ops, "quantize_into", limited(ops.quantize_into))


def test_out_of_memory_makes_the_tiles_smaller(
    source: Path, tmp_path: Path, piped: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "MIN_STRIP_BYTES", 256)
    want = bytes_of(go(source, tmp_path / "one"))
    short_of_memory(monkeypatch, 3000)
    assert bytes_of(piped(source, tmp_path / "many")) == want


def test_a_tile_that_is_wanted_whole_is_cut_only_where_the_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "MIN_STRIP_BYTES", 16)
    one, done, room = lane.Lane("cpu"), list[slice](), 100
    strips, values = lane.Strips([one], strip_bytes=10 * 8), torch.zeros(60, 2)  # 10 rows of 8 bytes

    def strip(rows: slice) -> None:
        if rows.stop - rows.start > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append(rows)

    strips.queue(strip, values, one, whole=True)
    assert done == [slice(0, 60)]
    room = 20
    strips.queue(strip, values, one, whole=True)
    assert done[1:] == [slice(first, first + 15) for first in range(0, 60, 15)]
    strips.queue(strip, values, one)
    assert done[5:] == [slice(first, first + 10) for first in range(0, 60, 10)]


def test_out_of_memory_for_good_is_an_error(
    source: Path, tmp_path: Path, piped: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "MIN_STRIP_BYTES", 256)
    short_of_memory(monkeypatch, 20)
    with pytest.raises(torch.OutOfMemoryError):
        piped(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_goes_wrong_while_reading_ahead(
    source: Path, tmp_path: Path, piped: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = threading.active_count(), TileReader.read_into

    def read_into(reader: TileReader, tensor, start: int, target: torch.Tensor) -> None:
        if start > 200_000:
            raise CheckpointError("the disk is gone")
        real(reader, tensor, start, target)

    with monkeypatch.context() as patch:
        patch.setattr(TileReader, "read_into", read_into)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            piped(source, tmp_path / "out")
    assert threading.active_count() <= before
    assert bytes_of(piped(source, tmp_path / "out")) == bytes_of(go(source, tmp_path / "one"))


def test_values_that_are_not_finite(tmp_path: Path, piped: Go) -> None:
    bad = gaussian(2000, 128, seed=1)
    bad[1500, 7], bad[1600, 3] = torch.nan, torch.inf
    source = write_folder(tmp_path / "model", {"a.weight": gaussian(64, 64), "b.weight": bad})
    for way in (go, piped):
        with pytest.raises(NonFiniteError, match=r"2 NaN or infinite values, the first at \[1500, 7\]"):
            way(source, tmp_path / "out")


def test_no_more_in_flight_than_lanes(source: Path, devices: tuple[str, ...]) -> None:
    checkpoint = plan_quantize(source, None, QuantizeOptions(k=3)).checkpoint
    tensor = checkpoint.tensors["model.layers.0.tall.weight"]
    asked = 0

    def pieces():
        nonlocal asked
        for piece in reader.matrix_pieces(tensor):
            asked += 1
            yield piece

    with TileReader(checkpoint, 1) as reader:
        pipeline = DevicePipeline(reader, devices)
        for done, (piece, found) in enumerate(pipeline.scanned(pieces())):
            assert asked - done <= len(pipeline.lanes)
            w = reader.read(tensor, piece.span)
            assert found.amax == w.float().abs().max().item()
        assert done > len(pipeline.lanes)


def test_names_of_devices(device: str) -> None:
    assert resolve_devices("cpu") == ("cpu",)
    if device == "cpu":
        with pytest.raises(SelectionError, match="device must be auto, cpu, cuda or GPUs"):
            plan_quantize(Path("model"), None, QuantizeOptions(k=3, device="gpu"))
        return
    every = resolve_devices("cuda")
    assert every == resolve_devices("auto") == tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    assert resolve_devices("cuda:0,cuda:0") == ("cuda:0",)
    with pytest.raises(BuildError, match="cuda:99 is none of cuda:0"):
        resolve_devices("cuda:0,cuda:99")
