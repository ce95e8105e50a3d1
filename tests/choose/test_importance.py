"""Importance files: the three kinds give the same numbers, names are found, and what does not fit is said."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kbitq.choose.importance import load_importance
from kbitq.errors import ImportanceError

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

VALUES = np.array([0.5, 2.0, 0.0, 8.0], np.float32)
EXPERTS = np.array([[1, 2, 3, 4], [0, 0, 0, 0], [9, 8, 7, 6]], np.float32)
CALLS = 3


def write_gguf(path: Path, entries: dict[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    """As llama-imatrix writes it: sums ``[matrices, in]`` and how many rows were summed for each matrix."""
    writer = gguf.GGUFWriter(path, "imatrix")
    for name, (mean, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", np.atleast_2d(mean) * counts[:, None])
        writer.add_tensor(f"{name}.counts", counts[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(path: Path, entries: dict[str, np.ndarray]) -> Path:
    data = struct.pack("<i", len(entries))
    for name, mean in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", CALLS, mean.size)
        data += (mean * CALLS).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", CALLS, 4) + b"text")
    return path


@pytest.fixture(params=["gguf", "dat"])
def matrix_file(request, tmp_path) -> Path:
    """A dense layer's query projection and a layer of three experts."""
    entries = {"blk.1.attn_q.weight": VALUES, "blk.2.ffn_gate_exps.weight": EXPERTS, "output.weight": VALUES}
    if request.param == "dat":
        return write_dat(tmp_path / "imatrix.dat", entries)
    counts = {name: np.array([CALLS] if v.ndim == 1 else [2, 0, 5], np.float32) for name, v in entries.items()}
    return write_gguf(tmp_path / "imatrix.gguf", {name: (v, counts[name]) for name, v in entries.items()})


def test_safetensors(tmp_path):
    path = tmp_path / "importance.safetensors"
    save_file({"a.weight": torch.from_numpy(VALUES), "m.experts.up": torch.from_numpy(EXPERTS).bfloat16()}, path)
    importance = load_importance(path)
    assert importance.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(importance) == 2
    assert importance.of("a.weight", (7, 4)).tolist() == VALUES.tolist()
    assert importance.of("m.experts.up", (3, 5, 4)).tolist() == EXPERTS.tolist()
    assert importance.of("b.weight", (7, 4)) is None
    assert importance.missing(["a.weight", "b.weight"]) == ["b.weight"]


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        ("model.layers.1.self_attn.q_proj.weight", (8, 4), VALUES),
        ("encoder.layer.1.attention.self.query.weight", (8, 4), VALUES),
        ("model.language_model.layers.1.self_attn.q_proj.weight", (8, 4), VALUES),
        ("lm_head.weight", (100, 4), VALUES),
        ("model.layers.2.mlp.experts.gate_up_proj", (3, 8, 4), EXPERTS),
        ("model.layers.2.mlp.experts.2.gate_proj.weight", (8, 4), EXPERTS[2]),
        ("model.layers.2.block_sparse_moe.experts.0.w1.weight", (8, 4), EXPERTS[0]),
    ],
)
def test_names_of_llama_cpp(matrix_file, name, shape, expected):
    assert load_importance(matrix_file).of(name, shape).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight", "x"])
def test_a_weight_without_an_entry(matrix_file, name):
    importance = load_importance(matrix_file)
    assert importance.of(name, (8, 4)) is None
    assert importance.missing([name]) == [name]


def test_an_entry_that_does_not_fit(matrix_file):
    with pytest.raises(ImportanceError, match=r"attn_q\.weight has 4 values, but model\.layers\.1.* has 5 columns"):
        load_importance(matrix_file).of("model.layers.1.self_attn.q_proj.weight", (8, 5))


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_values_that_cannot_be_weights(tmp_path, bad):
    save_file({"a": torch.tensor([1.0, bad])}, tmp_path / "i.safetensors")
    with pytest.raises(ImportanceError, match="negative or not finite"):
        load_importance(tmp_path / "i.safetensors").of("a", (3, 2))


@pytest.mark.parametrize("kept", [0, 3, 4, 9, 30, 60])
def test_a_dat_that_was_cut_short(tmp_path, kept):
    whole = write_dat(tmp_path / "imatrix.dat", {"blk.0.attn_q.weight": VALUES, "blk.0.attn_k.weight": VALUES})
    whole.write_bytes(whole.read_bytes()[:kept])
    with pytest.raises(ImportanceError, match=r"neither .* or cut short"):
        load_importance(whole)


def test_files_of_another_kind(tmp_path):
    with pytest.raises(ImportanceError, match="cannot be read"):
        load_importance(tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("no header here")
    with pytest.raises(ImportanceError, match="not a safetensors file"):
        load_importance(tmp_path / "text.safetensors")
    (tmp_path / "short.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ImportanceError, match="not a GGUF file"):
        load_importance(tmp_path / "short.gguf")
    model = write_gguf(tmp_path / "model.gguf", {})
    with pytest.raises(ImportanceError, match="not an importance matrix"):
        load_importance(model)


def test_without_the_package(monkeypatch, tmp_path):
    path = write_dat(tmp_path / "imatrix.dat", {"blk.0.attn_q.weight": VALUES})
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportanceError, match="needs the package gguf") as raised:
        load_importance(path)
    assert "kbitq[gguf]" in raised.value.hint
