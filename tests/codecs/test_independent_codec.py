"""Files that kbitq writes, read and made again by a codec written from docs/format.md alone (independent_codec.py)."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest

from helpers import independent_codec as other
from kbitq.checkpoint import QuantizeOptions, dequantize_checkpoint, plan_quantize, run

DTYPES = ("F32", "BF16", "F16", "F64")
LARGEST = {"F32": 3.4028e38, "BF16": 3.3895e38, "F16": 65504.0, "F64": 3.4e38}
CUSTOM = {
    "one-sided": lambda n: np.arange(1, n + 1) ** 2.0,
    "duplicates": lambda n: np.repeat(np.linspace(-1, 3, n // 2), 2),
}


def shapes_and_values(seed: int) -> dict[str, np.ndarray]:
    """Float64 tensors that a format gets wrong first."""
    draw = np.random.RandomState(seed)
    normal = draw.standard_normal
    outlier, zeros, tail = normal((64, 96)) * 1e-3, normal((64, 96)), normal((64, 96)) * 0.1
    outlier[3, 40] = 1000
    zeros[:, 32:64] = 0
    tail[0, 0] = 31 / 32  # the edge of the rule for the exponent
    return {
        "é.gauss.weight": normal((65, 100)),
        "short_rows.weight": normal((1300, 7)),
        "one_over.weight": normal((140, 33)),
        "huge.weight": normal((64, 96)) * 1e38,
        "tiny.weight": normal((64, 96)) * 1e-30,
        "denormal.weight": normal((64, 96)) * 1e-41,
        "wild.weight": normal((64, 96)) * 10.0 ** draw.randint(-38, 30, (64, 96)),
        "outlier.weight": outlier,
        "zeros.weight": zeros,
        "all_zero.weight": np.zeros((64, 96)),
        "constant.weight": np.full((64, 96), -0.375),
        "integers.weight": draw.randint(-8, 9, (64, 96)).astype(float),
        "edge.weight": tail,
        "conv.weight": normal((16, 10, 7, 5)),
        "layers.0.experts.down_proj": normal((3, 24, 80)),
        "layers.0.bias": normal(96),
    }


def checkpoint(path: Path, seed: int) -> Path:
    """One file with all of these in all dtypes, and tensors that are carried over."""
    stored = {
        f"{dtype}.{name}": other.stored_as(dtype, np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(np.float64))
        if dtype == "F64"
        else other.stored_as(dtype, np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(np.float32))
        for dtype in DTYPES
        for name, x in shapes_and_values(seed).items()
    }
    stored["ids"] = other.Stored("I64", (3,), bytes(24))
    stored["eight_bit.weight"] = other.Stored("F8_E4M3", (64, 64), bytes(range(256)) * 16)
    stored["empty.weight"] = other.Stored("F32", (0, 64), b"")
    other.write(path, stored)
    return path


def levels_of(file: other.File, name: str, w: np.ndarray) -> np.ndarray:
    """The normalised levels behind a stored codebook; the scaling by a power of two is exact both ways."""
    stored = np.frombuffer(file.tensors[name + "_codebook"].data, "<f4").astype(np.float64)
    return (stored * 2.0 ** -other.tensor_exponent(float(np.abs(w).max()))).astype(np.float32)


def check(source: Path, quantized: Path) -> int:
    """Every byte of ``quantized``, made again from ``source``. Returns the number of quantized tensors."""
    given, file = other.read(source), other.read(quantized)
    tensors = json.loads(file.metadata["kbitq"])["tensors"]
    printed = {}
    for name, meta in tensors.items():
        w, dtype = other.values(given.tensors[name]), given.tensors[name].dtype
        assert (tuple(meta["shape"]), meta["dtype"]) == (w.shape, dtype), name
        triple = other.encode(w, name, dtype, levels_of(file, name, w), meta["scale"])
        for part, data in zip(("_packed", "_absmax", "_codebook"), triple, strict=True):
            assert file.tensors[name + part].data == data, name + part
        decoded = other.decode(file, name, w.shape)
        assert np.isfinite(other.values(other.stored_as(dtype, decoded))).all(), name
        printed[name] = other.statistics(w, decoded, name)
    assert file.header == other.header(file, printed)
    for name, stored in given.tensors.items():
        assert name in tensors or file.tensors[name] == stored, name
    return len(tensors)


def test_the_other_codec_imports_nothing_of_ours():
    tree = ast.parse(Path(other.__file__).read_text())
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"json", "math", "struct", "pathlib", "typing", "numpy"}


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["mse", "absmax"])
@pytest.mark.parametrize("k", range(2, 9))
def test_every_byte_of_a_file_is_what_the_page_says(tmp_path, k, scale):
    source, out = checkpoint(tmp_path / "s.safetensors", seed=k), tmp_path / "q.safetensors"
    options = QuantizeOptions(k=k, scale=scale, codebook="nf" if scale == "absmax" else "optimal")
    run(plan_quantize(source, out, options))
    assert check(source, out) >= 50

    restored = tmp_path / "d.safetensors"
    dequantize_checkpoint(out, restored)
    given, file, back = other.read(source), other.read(out), other.read(restored)
    assert set(back.tensors) == set(given.tensors)
    for name, stored in given.tensors.items():
        if name + "_packed" in file.tensors:
            stored = other.stored_as(stored.dtype, other.decode(file, name, stored.shape))
        assert back.tensors[name] == stored, name


@pytest.mark.parametrize("levels", CUSTOM)
@pytest.mark.parametrize("k", [2, 3, 5])
def test_custom_codebooks(tmp_path, k, levels):
    source, out = checkpoint(tmp_path / "s.safetensors", seed=k), tmp_path / "q.safetensors"
    (tmp_path / "levels.json").write_text(json.dumps(CUSTOM[levels](2**k).tolist()))
    run(plan_quantize(source, out, QuantizeOptions(k=k, codebook=str(tmp_path / "levels.json"))))
    assert check(source, out) >= 50


def test_a_real_model(tmp_path, minilm):
    source, out = minilm / "model.safetensors", tmp_path / "q.safetensors"
    run(plan_quantize(source, out, QuantizeOptions(k=3, only=("*layer.0.*",))))
    assert check(source, out) == 6
