"""Back again: ``dequantize_checkpoint``, ``load_file``, ``save_file``, ``inspect``."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file as plain_load
from safetensors.torch import save_file as plain_save

import kbitq
from helpers.checkpoints import QUANTIZED, bytes_of, gaussian, model_tensors, raw_file, read_header, write_folder
from kbitq.checkpoint import RunReport, dequantize_checkpoint, inspect
from kbitq.codecs import reference
from kbitq.errors import CheckpointError, FormatError, KbitqError, OutputExistsError

Quantize = Callable[..., RunReport]


@pytest.fixture
def out(folder: Path, tmp_path: Path, quantize: Quantize) -> Path:
    quantize(folder, tmp_path / "out")
    return tmp_path / "out"


def decoded(out: Path, name: str, w: torch.Tensor) -> torch.Tensor:
    """By the reference codec, from the stored bytes."""
    got = plain_load(out / "model.safetensors")
    rows = w.shape[0] * w.shape[1] if "experts" in name else w.shape[0]
    parts = [got[name + s].numpy() for s in ("_packed", "_absmax", "_codebook")]
    values = reference.dequantize(parts[0].reshape(rows, -1), parts[1].reshape(rows, -1), parts[2], w.numel() // rows)
    return torch.from_numpy(np.ascontiguousarray(values)).to(w.dtype).reshape(w.shape)


@pytest.mark.parametrize("size", [10_000, 10**9])
def test_dequantize_gives_the_decode_rule_rounded_once(out: Path, tmp_path: Path, size: int) -> None:
    dequantize_checkpoint(out, tmp_path / "back", max_shard_size=size)
    back = {n: t for f in (tmp_path / "back").glob("*.safetensors") for n, t in plain_load(f).items()}
    source = model_tensors()
    assert back.keys() == source.keys()
    for name, w in source.items():
        assert (back[name].dtype, back[name].shape) == (w.dtype, w.shape)
        expected = decoded(out, name, w) if name in QUANTIZED else w
        assert back[name].reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8)), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == {"model_type": "tiny", "rms_norm_eps": 1e-05, "name": "é"}
    names = set(bytes_of(tmp_path / "back"))
    assert "tokenizer.json" in names and not names & {"SHA256SUMS", "quantization_report.json"}


def test_dequantize_to_another_dtype(out: Path, tmp_path: Path) -> None:
    dequantize_checkpoint(out, tmp_path / "back", dtype="float32")
    back = plain_load(tmp_path / "back" / "model.safetensors")
    assert {back[n].dtype for n in QUANTIZED} == {torch.float32}
    assert back["lm_head.weight"].dtype == torch.bfloat16
    with pytest.raises(KbitqError, match="dtype must be one of"):
        dequantize_checkpoint(out, tmp_path / "other", dtype="int8")


def test_a_dtype_that_is_too_small(tmp_path: Path, quantize: Quantize) -> None:
    plain_save({"a.weight": gaussian(64, 64, dtype=torch.float32) * 1e8}, tmp_path / "m.safetensors")
    quantize(tmp_path / "m.safetensors", tmp_path / "q.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight has values too large for F16"):
        dequantize_checkpoint(tmp_path / "q.safetensors", tmp_path / "b.safetensors", dtype="float16")
    assert not (tmp_path / "b.safetensors").exists()


def test_dequantize_file_to_file_and_folder(tmp_path: Path, quantize: Quantize) -> None:
    plain_save(model_tensors(), tmp_path / "m.safetensors")
    quantize(tmp_path / "m.safetensors", tmp_path / "q.safetensors")
    dequantize_checkpoint(tmp_path / "q.safetensors", tmp_path / "b.safetensors")
    assert plain_load(tmp_path / "b.safetensors").keys() == model_tensors().keys()
    with safe_open(tmp_path / "b.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    quantize(tmp_path / "m.safetensors", tmp_path / "folder")
    dequantize_checkpoint(tmp_path / "folder", tmp_path / "back")
    assert set(bytes_of(tmp_path / "back")) == {"model.safetensors"}  # the config held nothing else


def test_dequantize_refuses(folder: Path, out: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not quantized by kbitq"):
        dequantize_checkpoint(folder, tmp_path / "back")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "x").write_text("x")
    with pytest.raises(OutputExistsError):
        dequantize_checkpoint(out, tmp_path / "back")


def test_load_file(out: Path) -> None:
    loaded, source = kbitq.load_file(out), model_tensors()
    assert loaded.keys() == source.keys()
    for name, w in source.items():
        got = loaded[name]
        if name in QUANTIZED:
            assert isinstance(got, kbitq.QuantizedTensor)
            assert (got.shape, got.dtype, got.k, got.scale, got.codebook_name) == (
                w.shape,
                w.dtype,
                3,
                "mse",
                "optimal",
            )
            assert got.dequantize().equal(decoded(out, name, w))
        else:
            assert got.reshape(-1).view(torch.uint8).equal(w.reshape(-1).view(torch.uint8))


def test_save_file_gives_the_same_triples(out: Path, tmp_path: Path) -> None:
    kbitq.save_file(kbitq.load_file(out), tmp_path / "saved.safetensors", {"note": "é"})
    first, second = plain_load(out / "model.safetensors"), plain_load(tmp_path / "saved.safetensors")
    guard = "model.layers.0.mlp.down_proj.weight"
    assert second.keys() == first.keys() - {guard}
    assert all(second[n].reshape(-1).view(torch.uint8).equal(first[n].reshape(-1).view(torch.uint8)) for n in second)
    metadata = read_header(tmp_path / "saved.safetensors")[1]["__metadata__"]
    assert list(metadata) == ["format", "kbitq", "note"] and metadata["note"] == "é"
    again = kbitq.load_file(tmp_path / "saved.safetensors")
    for name, tensor in kbitq.load_file(out).items():
        if isinstance(tensor, kbitq.QuantizedTensor):
            assert (again[name].sqnr_db, again[name].shape) == (tensor.sqnr_db, tensor.shape)


def test_save_file_of_library_tensors(tmp_path: Path) -> None:
    w = gaussian(40, 100)
    kbitq.save_file({"w": kbitq.quantize(w, 4), "b": torch.ones(3).expand(2, 3)}, tmp_path / "s.safetensors")
    loaded = kbitq.load_file(tmp_path / "s.safetensors")
    assert loaded["w"].dequantize().equal(kbitq.quantize(w, 4).dequantize()) and loaded["b"].equal(torch.ones(2, 3))
    kbitq.save_file({"b": torch.zeros(1)}, tmp_path / "s.safetensors")
    assert plain_load(tmp_path / "s.safetensors").keys() == {"b"}
    with pytest.raises(ValueError, match="kbitq"):
        kbitq.save_file({}, tmp_path / "t.safetensors", {"kbitq": "x"})
    with pytest.raises(CheckpointError, match="two tensors"):
        kbitq.save_file({"w": kbitq.quantize(w, 4), "w_packed": torch.ones(1)}, tmp_path / "t.safetensors")


def test_load_file_of_an_ordinary_file(folder: Path, tmp_path: Path) -> None:
    assert kbitq.load_file(folder).keys() == model_tensors().keys()
    raw_file(tmp_path / "m.safetensors", {"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 1]}}, b"x")
    with pytest.raises(CheckpointError, match="a is Q9, which torch has no dtype for"):
        kbitq.load_file(tmp_path / "m.safetensors")


def test_metadata_may_be_lost_where_a_config_remains(out: Path, tmp_path: Path) -> None:
    path = out / "model.safetensors"
    before = kbitq.load_file(out)
    _, header, data = read_header(path)
    header["__metadata__"] = {"format": "pt"}
    raw_file(path, header, data)
    after = kbitq.load_file(out)
    assert after.keys() == before.keys()
    for name in QUANTIZED:
        assert (after[name].shape, after[name].dtype) == (before[name].shape, before[name].dtype)
        assert after[name].dequantize().equal(before[name].dequantize())


@pytest.mark.parametrize("part", ["_packed", "_absmax", "_codebook"])
@pytest.mark.parametrize("change", ["gone", "dtype", "shape"])
def test_a_broken_triple_is_refused(out: Path, part: str, change: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = out / "model.safetensors"
    _, header, data = read_header(path)
    entry = header[name + part]
    if change == "gone":
        header = {("other" if n == name + part else n): v for n, v in header.items()}
    elif change == "dtype":
        entry["dtype"] = {"I32": "F32", "U8": "I8", "F32": "I32"}[entry["dtype"]]
    else:
        entry["shape"] = [1, *reversed(entry["shape"])]
    raw_file(path, header, data)
    with pytest.raises(FormatError, match=r"up_proj\.weight"):
        kbitq.load_file(out)


def test_inspect_quantized(out: Path, folder: Path) -> None:
    report = inspect(out)
    assert report.quantized and report.totals["quantized"] == 6 and report.totals["bits_per_weight"] > 3.25
    assert list(report.tensors[0]) == [
        "name", "verdict", "reason", "shape", "dtype", "k", "bits_per_weight", "scale", "codebook", "sqnr_db",
        "max_abs_err", "bytes",
    ]  # fmt: skip
    again = inspect(out, against=folder)
    for told, measured in zip(report.tensors, again.tensors, strict=True):
        if told["sqnr_db"] is not None:
            assert told["sqnr_db"] == round(measured["sqnr_db"], 4)
    assert again.totals["sqnr_db"] == pytest.approx(again.totals["mean_sqnr_db"], abs=3)


def test_inspect_against_another_source(out: Path, tmp_path: Path) -> None:
    tensors = model_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"] = gaussian(64, 96)
    with pytest.raises(CheckpointError, match="it is not the source"):
        inspect(out, against=write_folder(tmp_path / "other", tensors))


def test_inspect_says_what_each_k_would_give(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    report = inspect(folder, ks=(2, 3))
    assert not report.quantized
    for k in (2, 3):
        done = quantize(folder, tmp_path / f"out{k}", k=k)
        assert report.totals["would"][k]["sqnr_db"] == pytest.approx(done.totals["sqnr_db"])
        assert report.totals["would"][k]["bytes"] == done.totals["bytes_out"]
        rows = {t["name"]: t for t in done.tensors}
        for row in report.tensors:
            if row["would"]:
                assert row["would"][k]["bytes"] == rows[row["name"]]["bytes"]
                assert row["would"][k]["sqnr_db"] == rows[row["name"]]["sqnr_db"]


def test_inspect_sample_is_close(tmp_path: Path) -> None:
    plain_save({"a.weight": gaussian(2048, 1088), "b.weight": gaussian(64, 65)}, tmp_path / "m.safetensors")
    whole, sample = inspect(tmp_path / "m.safetensors"), inspect(tmp_path / "m.safetensors", sample=True)
    for k in (2, 3, 4, 5):
        difference = whole.totals["would"][k]["sqnr_db"] - sample.totals["would"][k]["sqnr_db"]
        assert 0 < abs(difference) < 0.05


def test_inspect_of_bad_values_does_not_stop(tmp_path: Path) -> None:
    plain_save({"a.weight": torch.full((64, 64), torch.inf), "b.weight": gaussian(64, 64)}, tmp_path / "m.safetensors")
    rows = {t["name"]: t for t in inspect(tmp_path / "m.safetensors").tensors}
    assert (rows["a.weight"]["verdict"], rows["a.weight"]["reason"]) == ("kept", "values are not finite")
    assert rows["b.weight"]["would"]


def test_inspect_refuses_a_codebook_that_is_not_finite(out: Path) -> None:
    file = out / "model.safetensors" if out.is_dir() else out
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:start])
    name = next(n for n in entries if n.endswith("_codebook"))
    at = start + entries[name]["data_offsets"][0]
    raw[at : at + 4] = b"\x00\x00\xc0\x7f"
    file.write_bytes(raw)
    with pytest.raises(FormatError, match=name):
        inspect(out)
