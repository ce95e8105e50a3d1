"""Whole runs: the bytes written, held against the reference codec; what is carried; options; what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers.checkpoints import QUANTIZED, bytes_of, gaussian, model_tensors, read_header, write_folder
from kbitq.checkpoint import QuantizeOptions, RunReport, plan_quantize, run
from kbitq.codecs import codebooks, reference
from kbitq.errors import (
    CheckpointError,
    CodebookError,
    KbitqError,
    NonFiniteError,
    NoSpaceError,
    SelectionError,
)
from kbitq.format import GUARD_SENTENCE

Quantize = Callable[..., RunReport]
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F32"}


def stored(out: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in sorted(out.glob("*.safetensors")) for n, t in load_file(path).items()}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def as_matrix(name: str, w: torch.Tensor) -> np.ndarray:
    rows = w.shape[0] * w.shape[1] if "experts" in name.split(".") else w.shape[0]
    return w.float().reshape(rows, -1).numpy()


@pytest.mark.parametrize("scale", ["mse", "absmax"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_every_triple_equals_the_reference(
    folder: Path, tmp_path: Path, quantize: Quantize, k: int, scale: str
) -> None:
    quantize(folder, tmp_path / "out", k=k, scale=scale)
    got, source = stored(tmp_path / "out"), model_tensors()
    seen = {n.removesuffix("_packed") for n in got if n.endswith("_packed")}
    assert seen == QUANTIZED
    for name in seen:
        w = as_matrix(name, source[name])
        packed, absmax, codebook = reference.quantize(
            w, k, codebooks.optimal(k), scale=scale, dtype=DTYPES[source[name].dtype]
        )
        assert np.array_equal(got[name + "_packed"].reshape(w.shape[0], -1).numpy(), packed), name
        assert np.array_equal(got[name + "_absmax"].reshape(w.shape[0], -1).numpy(), absmax), name
        assert np.array_equal(got[name + "_codebook"].numpy(), codebook), name
    for name in source.keys() - seen:
        assert got[name].dtype == source[name].dtype and got[name].shape == source[name].shape
        assert got[name].reshape(-1).view(torch.uint8).equal(source[name].reshape(-1).view(torch.uint8)), name


def test_experts_stay_three_dimensional(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    quantize(folder, tmp_path / "out")
    got = stored(tmp_path / "out")
    assert got["model.layers.0.mlp.experts.gate_up_proj_packed"].shape == (4, 48, 2 * 3)
    assert got["model.layers.0.mlp.experts.gate_up_proj_absmax"].shape == (4, 48, 2)


def test_header_layout(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    quantize(folder, tmp_path / "out")
    text, header, data = read_header(tmp_path / "out" / "model.safetensors")
    assert text.startswith(b'{"__metadata__":{"format":"pt","kbitq":"{\\"format_version\\":1,\\"tensors\\":{')
    assert len(text) % 8 == 0 and b", " not in text.rstrip()
    metadata = header.pop("__metadata__")
    size = {"F64": 8, "I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
    assert list(header) == sorted(header, key=lambda n: (-size[header[n]["dtype"]], n))
    position = 0
    for value in header.values():
        assert value["data_offsets"][0] == position
        position = value["data_offsets"][1]
    assert position == len(data)
    table = json.loads(metadata["kbitq"])["tensors"]
    assert set(table) == QUANTIZED
    wide = table["model.layers.1.wide.weight"]
    assert list(wide) == ["k", "shape", "dtype", "scale", "codebook", "sqnr_db", "max_abs_err"]
    assert (wide["k"], wide["shape"], wide["dtype"]) == (3, [32, 160], "F64")
    # Each statistic has room for 16 characters.
    spare = 0
    for name, meta in table.items():
        raw = metadata["kbitq"].split(json.dumps(name), 1)[1]
        for key in ("sqnr_db", "max_abs_err"):
            spare += 16 - len(raw.split(f'"{key}":', 1)[1].split(",")[0].split("}")[0])
        assert meta["sqnr_db"] == round(meta["sqnr_db"], 4)
    unpadded = len(text.rstrip()) + spare
    assert len(text) == -(-unpadded // 8) * 8


def test_metadata_says_why_tensors_were_kept(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    report = quantize(folder, tmp_path / "out")
    _, header, _ = read_header(tmp_path / "out" / "model.safetensors")
    kept = json.loads(header["__metadata__"]["kbitq"])["kept"]
    assert kept == {t["name"]: t["reason"] for t in report.tensors if t["verdict"] == "kept"}
    assert kept["model.layers.0.mlp.gate.weight"] == "router"
    assert kept["model.layers.0.input_layernorm.weight"] == "norm"


def test_config_guard_and_small_files(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (folder / "adapter_model.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    report = quantize(folder, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["name"], config["rms_norm_eps"]) == ("tiny", "é", 1e-05)
    assert config["quantization_config"] == {
        "quant_method": "kbitq", "format_version": 1, "block_size": 32, "scale_format": "e4m4", "dtype": "BF16", "k": 3,
        "overrides": {},
        "shapes": {
            "model.layers.0.mlp.down_proj.weight": [64, 200],
            "model.layers.1.conv.weight": [64, 8, 3, 3],
        },
        "modules_to_not_convert": [
            "lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.empty", "model.layers.1.fp8",
            "model.layers.1.tiny",
        ],
        "dtypes": {
            "model.layers.1.conv.weight": "F32", "model.layers.1.mlp.up_proj.weight": "F16",
            "model.layers.1.wide.weight": "F64",
        },
    }  # fmt: skip
    assert config["transformers_weights"] == GUARD_SENTENCE
    _, header, _ = read_header(tmp_path / "out" / "model.safetensors")
    assert (
        header["model.layers.0.mlp.down_proj.weight"]["shape"] == [0]
        and header["model.layers.0.mlp.down_proj.weight"]["dtype"] == "F32"
    )
    out = bytes_of(tmp_path / "out")
    assert out["tokenizer.json"] == b"{}" and "1_Pooling/config.json" in out and "pytorch_model.bin" not in out
    assert out["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()
    assert any("pytorch_model.bin" in note for note in report.notes)
    ledger = json.loads(out["quantization_report.json"])
    assert {t["name"] for t in ledger["tensors"]} >= set(model_tensors())
    assert any("adapter_model.safetensors" in t["reason"] for t in ledger["tensors"])


def test_resharding_keeps_triples_together(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    quantize(folder, tmp_path / "out", max_shard_size=8_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    weight_map = index["weight_map"]
    total = 0
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert set(opened.keys()) == {n for n, f in weight_map.items() if f == file}
        total += len(read_header(tmp_path / "out" / file)[2])
    assert index["metadata"]["total_size"] == total
    for name in QUANTIZED:
        assert len({weight_map[name + s] for s in ("_packed", "_absmax", "_codebook")}) == 1
    assert weight_map["model.layers.0.mlp.down_proj.weight"] == weight_map["model.layers.0.mlp.down_proj.weight_packed"]


def test_one_file_to_one_file(tmp_path: Path, quantize: Quantize) -> None:
    save_file(model_tensors(), tmp_path / "m.safetensors")
    report = quantize(tmp_path / "m.safetensors", k=4)
    assert report.out == tmp_path / "m-kbitq-k4.safetensors"
    assert names(tmp_path) == ["m-kbitq-k4.safetensors", "m.safetensors"]
    assert "model.layers.0.mlp.down_proj.weight" not in read_header(report.out)[1]  # a guard is for folders


def test_one_file_to_a_folder(tmp_path: Path, quantize: Quantize) -> None:
    save_file(model_tensors(), tmp_path / "m.safetensors")
    quantize(tmp_path / "m.safetensors", tmp_path / "out")
    assert names(tmp_path / "out") == [
        "README.md", "SHA256SUMS", "config.json", "model.safetensors", "quantization_report.json",
    ]  # fmt: skip


def test_default_folder_name(folder: Path, quantize: Quantize) -> None:
    assert quantize(folder, k=2).out == folder.parent / "tiny-kbitq-k2"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("max_memory", [None, 1])
def test_bytes_do_not_depend_on_threads_or_memory(
    tmp_path: Path, quantize: Quantize, threads: int, max_memory: int | None
) -> None:
    tensors = {
        "a.weight": gaussian(9, 40_000, seed=1, dtype=torch.float32),  # rows longer than the smallest tile
        "b.weight": gaussian(500, 333, seed=2),
        "c.weight": gaussian(3, 70_001, seed=3, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        quantize(tmp_path / "m.safetensors", tmp_path / "got.safetensors", max_memory=max_memory)
    finally:
        torch.set_num_threads(before)
    got = load_file(tmp_path / "got.safetensors")
    meta = json.loads(read_header(tmp_path / "got.safetensors")[1]["__metadata__"]["kbitq"])["tensors"]
    for name, w in tensors.items():
        packed, absmax, codebook = reference.quantize(w.float().numpy(), 3, codebooks.optimal(3), dtype=DTYPES[w.dtype])
        assert np.array_equal(got[name + "_packed"].numpy(), packed)
        assert np.array_equal(got[name + "_absmax"].numpy(), absmax)
        rows = reference.stats(w.float().numpy(), packed, absmax, codebook)
        signal, noise = np.add.accumulate(rows[:, 0])[-1], np.add.accumulate(rows[:, 1])[-1]
        assert meta[name]["sqnr_db"] == round(10 * np.log10(signal / noise), 4)
        assert meta[name]["max_abs_err"] == float(f"{rows[:, 2].max():.6e}")


def with_bad_values(folder: Path) -> Path:
    tensors = model_tensors()
    bad = tensors["model.layers.0.mlp.down_proj.weight"]
    bad[3, 5], bad[3, 7] = torch.nan, torch.inf
    return write_folder(folder, tensors)


def test_nonfinite_is_an_error_before_anything_is_written(tmp_path: Path, quantize: Quantize) -> None:
    source = with_bad_values(tmp_path / "bad")
    with pytest.raises(
        NonFiniteError, match=r"down_proj\.weight has 2 NaN or infinite values, the first at \[3, 5\]"
    ) as e:
        quantize(source, tmp_path / "out")
    assert (e.value.tensor, e.value.count, e.value.first) == ("model.layers.0.mlp.down_proj.weight", 2, 605)
    assert names(tmp_path) == ["bad"]


def test_nonfinite_keep(tmp_path: Path, quantize: Quantize) -> None:
    source = with_bad_values(tmp_path / "bad")
    report = quantize(source, tmp_path / "out", on_nonfinite="keep")
    row = next(t for t in report.tensors if t["name"].endswith("down_proj.weight"))
    assert (row["verdict"], row["reason"]) == ("kept", "2 values are not finite")
    got = stored(tmp_path / "out")["model.layers.0.mlp.down_proj.weight"]
    assert got.isnan().sum() == 1 and got.isinf().sum() == 1


def test_nothing_left_to_quantize_after_keeping(tmp_path: Path, quantize: Quantize) -> None:
    save_file({"a.weight": torch.full((64, 64), torch.nan)}, tmp_path / "m.safetensors")
    with pytest.raises(SelectionError, match="not finite"):
        quantize(tmp_path / "m.safetensors", on_nonfinite="keep")
    assert names(tmp_path) == ["m.safetensors"]


def test_float64_beyond_float32_is_not_finite(tmp_path: Path, quantize: Quantize) -> None:
    w = gaussian(64, 64, dtype=torch.float64)
    w[1, 1] = 1e300
    save_file({"a.weight": w}, tmp_path / "m.safetensors")
    with pytest.raises(NonFiniteError):
        quantize(tmp_path / "m.safetensors")


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e30])
def test_range_does_not_matter(tmp_path: Path, quantize: Quantize, magnitude: float) -> None:
    save_file({"a.weight": gaussian(64, 128, dtype=torch.float32) * magnitude}, tmp_path / "m.safetensors")
    report = quantize(tmp_path / "m.safetensors")
    assert report.totals["sqnr_db"] > 15.5


def test_a_tensor_of_zeros_has_no_sqnr(tmp_path: Path, quantize: Quantize) -> None:
    save_file({"a.weight": torch.zeros(64, 64), "b.weight": gaussian(64, 64)}, tmp_path / "m.safetensors")
    report = quantize(tmp_path / "m.safetensors", tmp_path / "q.safetensors")
    text, header, _ = read_header(tmp_path / "q.safetensors")
    assert '"sqnr_db":null,"max_abs_err":0.000000e+00' in header["__metadata__"]["kbitq"]
    assert report.totals["worst"]["name"] == "b.weight" and len(text) % 8 == 0
    assert not load_file(tmp_path / "q.safetensors")["a.weight_absmax"].any()


def test_already_quantized(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    quantize(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already quantized by kbitq"):
        quantize(tmp_path / "out", tmp_path / "again")
    with pytest.raises(CheckpointError, match="already quantized by kbitq"):
        quantize(tmp_path / "out" / "model.safetensors", tmp_path / "again")


def test_name_clash(tmp_path: Path, quantize: Quantize) -> None:
    save_file({"a.weight": gaussian(64, 64), "a.weight_packed": torch.ones(3)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"already called a\.weight_packed"):
        quantize(tmp_path / "m.safetensors")


def test_disk_full_at_the_start(
    folder: Path, tmp_path: Path, quantize: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("kbitq.checkpoint.output.staging.shutil.disk_usage", lambda path: usage)
    with pytest.raises(NoSpaceError, match="1,000 free"):
        quantize(folder, tmp_path / "out")
    assert names(tmp_path) == ["tiny"]


def test_a_source_that_changes_under_way(folder: Path, tmp_path: Path) -> None:
    plan = plan_quantize(folder, tmp_path / "out", QuantizeOptions(k=3))
    file = folder / "model-00001-of-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="changed while it was used"):
        run(plan)
    assert names(tmp_path) == ["tiny"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_of_a_run_that_stops_before_writing(folder: Path, tmp_path: Path, error: type) -> None:
    def stop(progress: object) -> None:
        raise error

    with pytest.raises(error):
        run(plan_quantize(folder, tmp_path / "out", QuantizeOptions(k=3)), stop)
    assert names(tmp_path) == ["tiny"]


def test_progress_reaches_the_total(folder: Path, tmp_path: Path) -> None:
    seen = []
    run(plan_quantize(folder, tmp_path / "out", QuantizeOptions(k=3)), seen.append)
    assert seen[-1].bytes_done == seen[-1].bytes_total
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)


def test_custom_codebook(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    (tmp_path / "levels.json").write_text("[-1, -0.3, 0.2, 1]")
    quantize(folder, tmp_path / "out", k=2, codebook=str(tmp_path / "levels.json"))
    _, header, _ = read_header(tmp_path / "out" / "model.safetensors")
    table = json.loads(header["__metadata__"]["kbitq"])["tensors"]
    assert {t["codebook"] for t in table.values()} == {"custom"}
    with pytest.raises(CodebookError):
        quantize(folder, tmp_path / "out3", k=3, codebook=str(tmp_path / "levels.json"))


@pytest.mark.parametrize("options", [{"k": 1}, {"k": 9}, {"scale": "best"}, {"device": "tpu"}, {"max_shard_size": 0}])
def test_bad_options(folder: Path, tmp_path: Path, quantize: Quantize, options: dict[str, object]) -> None:
    with pytest.raises(KbitqError):
        quantize(folder, tmp_path / "out", **options)


def test_min_coverage(folder: Path, tmp_path: Path, quantize: Quantize) -> None:
    with pytest.raises(
        SelectionError, match=r"only \d+\.\d% of the parameters would be quantized, less than the 95\.0%"
    ):
        quantize(folder, tmp_path / "out", min_coverage=0.95)
    quantize(folder, tmp_path / "out", min_coverage=0.2)
